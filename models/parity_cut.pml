/* The parity cut: a bucket's owner is lost at any moment, and the bucket comes back from its mirrors.
 *
 * Bucket X lives at ps 0, its stripe's other member Y at ps 3. Two mirrors keep the XOR of both: mirror 0 at ps 1,
 * mirror 1 at ps 2 (with row weights the argument is the same: XOR and GF(2^8) sums are both linear). Each life of
 * X (1: the owner at ps 0; 2: recovered at ps 1 from mirror 0; 3: at ps 2 from mirror 1) may be a zombie: "lost" is
 * what the master says, and the process goes on, or not, which covers a death at every line.
 *
 * Modelled: differences numbered by seq; every difference of every life may be delivered to a mirror at any moment
 * again (resent, late, from a zombie); acknowledgement of pushes and of repeats (protect: acked); tails kept until
 * all mirrors have them; levelling by Tail with its fence; the fold of Y out of a copy of the mirror while Y changes,
 * contents and differences of Y in one order, resent after a reconnect; a second loss in mid-recovery; loss of a
 * mirror's ps and the smaller set of mirrors after it.
 *
 * Contents are real XORs: push p by life L writes L at its own two bits of slot p%2, Y writes the same bits. So a
 * difference that is applied twice, lost, or taken from another life shows in the bytes.
 *
 * Checked: a push that was acknowledged is in every later life, as the same change; the recovered bytes are those of
 * the differences that were applied; at rest every push is in the last life once, and the listed mirrors equal it.
 */

/* Two cuts of the whole are searched: many pushes with a resting Y, and few with a changing one. */
#ifndef PUSHES
#define PUSHES 3
#endif
#ifndef CHANGES_OF_Y
#define CHANGES_OF_Y 0
#endif
#define BITS(p, id) ((id) << (((p) >> 1) * 2))
#define SLOT(p) ((p) & 1)
#define G(a, p) (a * PUSHES + p)
#define HAS(set, m) (((set) >> (m)) & 1)

/* X as each life holds it; index 0 unused */
byte seq[4];          /* changes of X; also its watermark: push p is change p + 1 */
byte x[8];            /* [life * 2 + slot] */
byte who[4 * PUSHES]; /* which life made change p + 1, as this life believes */
bool serving[4];
byte need[4];         /* mirrors that this life's placement names: bit m */
byte given[8];        /* [life * 2 + mirror]: the newest answer of that mirror to this life */

/* the mirrors */
byte at[2];           /* X's changes applied */
byte fence[2];        /* differences of X are taken from this life or later ones */
byte tail[2];         /* changes in (tail, at] are kept as differences */
byte has[2 * PUSHES]; /* which life's change p + 1 was applied */
byte page[4];         /* [mirror * 2 + slot] */

/* Y, and its stream to each mirror: in order, from any earlier point again after a reconnect */
byte y[2];
byte y_seq;
byte y_at[2];         /* Y's changes applied to the mirror */
#define YLOG 4        /* two changes, two chunks of contents */
byte y_kind[2 * YLOG];  /* 1, 2: change number 1, 2 (of slot 0, 1); 4, 5: contents of slot 0, 1 */
byte y_value[2 * YLOG];
byte y_then[2 * YLOG];  /* Y's seq when the entry was made */
byte y_len[2];
byte y_ptr[2];
bool y_again[2];      /* the stream was resent once */
byte y_asked[2];      /* Want: chunks made so far + 1; 0 = not asked */

/* recovery: a working copy of the mirror, from which Y is folded out */
bool folding[2];
byte copy[4];
byte covered[2];      /* slots of Y that were folded out */

/* the master */
byte owner = 1;       /* life that the placement makes the owner */
byte named = 3;       /* mirrors that the placement names */
byte losses;

bool done;            /* the check at rest passed */

/* what the worker was told */
byte acked;
byte acked_who[PUSHES];

inline apply(m, p, id) {
    page[m * 2 + SLOT(p)] = page[m * 2 + SLOT(p)] ^ BITS(p, id);
    has[G(m, p)] = id
}

#ifdef OLD_TAIL_IS_ANSWERED
#define TAIL_TAKEN true
#else
#define TAIL_TAKEN (fence[1] <= 2)
#endif
#define OTHERS(life) (life == 1 -> named : (life == 2 -> (named & 2) : 0))
#define CONFIRMED(life, n) ((!HAS(need[life], 0) || given[life * 2] >= n) && (!HAS(need[life], 1) || given[life * 2 + 1] >= n))
#define CONFIRMED_ONE(life, n) (need[life] == 0 || (HAS(need[life], 0) && given[life * 2] >= n) || (HAS(need[life], 1) && given[life * 2 + 1] >= n))

/* A difference of X reaches mirror m, from any life that ever had it. */
proctype Net(byte m) {
    byte n;
    bool repeated;
    do
    :: atomic { seq[1] > at[m] && fence[m] <= 1 && at[m] < PUSHES ->
           n = at[m]; apply(m, n, who[G(1, n)]); at[m] = n + 1; given[2 + m] = n + 1; n = 0 }
    :: atomic { seq[2] > at[m] && fence[m] <= 2 && m == 1 && serving[2] ->
           n = at[m]; assert(who[G(2, n)] != 0); apply(m, n, who[G(2, n)]); at[m] = n + 1; given[4 + m] = n + 1; n = 0 }
    /* said again: a repeat is answered with what is there */
    :: atomic { m == 1 && serving[2] && fence[m] <= 2 && given[4 + m] < at[m] && seq[2] >= at[m] -> given[4 + m] = at[m] }
#ifdef APPLIES_REPEATS
    :: atomic { at[m] > 0 && fence[m] <= 1 && seq[1] >= at[m] && !repeated ->
           repeated = 1; apply(m, at[m] - 1, 1) }
#endif
    /* the owner confirmed that all mirrors have them: older differences may go */
#ifdef TAIL_GOES_AT_ONCE
    :: atomic { tail[m] < at[m] -> tail[m] = at[m] }
#else
    :: atomic { fence[m] <= 1 && tail[m] < at[m] && CONFIRMED(1, tail[m] + 1) -> tail[m]++ }
#endif
    od
}

inline serve(L) {
    do
    /* a push at the watermark is applied; workers with old maps reach zombies too */
    :: atomic { serving[L] && seq[L] < PUSHES ->
           x[L * 2 + SLOT(seq[L])] = x[L * 2 + SLOT(seq[L])] ^ BITS(seq[L], L);
           who[G(L, seq[L])] = L; seq[L]++ }
    /* push number acked, applied or a repeat, is acknowledged */
    :: atomic { serving[L] && acked < seq[L] &&
#ifdef ACKED_AT_ONCE
                1
#else
#ifdef ACKED_BY_ONE_MIRROR
                CONFIRMED_ONE(L, acked + 1)
#else
                CONFIRMED(L, acked + 1)
#endif
#endif
           -> acked_who[acked] = who[G(L, acked)]; acked++ }
#ifdef REPEAT_ACKED_AT_ONCE
    :: atomic { serving[L] && L > 1 && acked < seq[L] -> acked_who[acked] = who[G(L, acked)]; acked++ }
#endif
    /* the newest placement reaches this life: it may never do so at a zombie */
    :: atomic { serving[L] && owner == L && need[L] != OTHERS(L) -> need[L] = OTHERS(L) }
    :: atomic { serving[L] && owner != L -> serving[L] = 0; break }
    :: atomic { done -> break }
    od
}

proctype First() {
    serve(1)
}

/* Life L is made from mirror m = L - 2; `other` is the mirror it has to be levelled with, if it is named. */
proctype Recovered(byte L) {
    byte m, n, s;
    atomic { owner == L -> m = L - 2 }
    /* its ps takes no differences from older owners any more */
#ifndef OWN_MIRROR_NOT_FENCED
    atomic { fence[m] = L }
#endif
#ifndef NO_LEVELLING
    if
    /* Tail: fence and answer in one step at the other mirror's ps, which refuses it if it knows of a later owner */
    :: atomic { L == 2 && HAS(named, 1) && TAIL_TAKEN ->
#ifndef TAIL_DOES_NOT_FENCE
           fence[1] = L;
#endif
           n = at[0];
           do
           :: n < at[1] -> assert(tail[1] <= n); apply(0, n, has[G(1, n)]); n++
           :: else -> break
           od;
           at[0] = n; given[4 + 1] = at[1] }
    :: atomic { L == 3 || !HAS(named, 1) -> skip }
    fi;
#else
    atomic { L == 2 && fence[1] < L -> fence[1] = L };
#endif
#ifndef OWN_MIRROR_NOT_FENCED
    fence[m] = L;
#endif
    /* fold Y out of a copy */
    atomic { copy[m * 2] = page[m * 2]; copy[m * 2 + 1] = page[m * 2 + 1]; folding[m] = 1; y_asked[m] = 1 }
#ifdef PROMOTES_BEFORE_FOLDED
    atomic { covered[m] >= 1 -> skip }
#else
    atomic { covered[m] == 2 -> skip }
#endif
    atomic {
        folding[m] = 0; seq[L] = at[m];
        x[L * 2] = copy[m * 2]; x[L * 2 + 1] = copy[m * 2 + 1];
        /* the mirror that is behind gets what it lacks from this ps's tail */
        assert(L == 3 || !HAS(named, 1) || at[1] >= tail[0]);
        n = 0; s = 0;
        do
        :: n < at[m] -> who[G(L, n)] = has[G(m, n)]; n++
        :: else -> break
        od;
        /* bit for bit what was applied, and nothing that was acknowledged is missing or another change */
        n = 0;
        do
        :: n < seq[L] -> if :: SLOT(n) == 0 -> s = s ^ BITS(n, who[G(L, n)]) :: else -> skip fi; n++
        :: else -> break
        od;
        assert(x[L * 2] == s);
        s = 0; n = 0;
        do
        :: n < seq[L] -> if :: SLOT(n) == 1 -> s = s ^ BITS(n, who[G(L, n)]) :: else -> skip fi; n++
        :: else -> break
        od;
        assert(x[L * 2 + 1] == s);
        need[L] = OTHERS(L);
#ifdef PROMOTES_DROPPED_MIRROR
        if :: L == 2 -> need[L] = 0 :: else -> skip fi;
#endif
        if
        :: owner == L ->
            serving[L] = 1;
            assert(seq[L] >= acked);
            n = 0;
            do
            :: n < acked -> assert(who[G(L, n)] == acked_who[n]); n++
            :: else -> break
            od
        :: else -> serving[L] = 1   /* a zombie that does not know yet */
        fi;
        n = 0; s = 0
    };
    serve(L)
}

/* Y goes on changing; its stream carries differences, and contents when asked, in one order per mirror. */
inline y_put(m, k, v) {
    y_kind[m * YLOG + y_len[m]] = k; y_value[m * YLOG + y_len[m]] = v; y_then[m * YLOG + y_len[m]] = y_seq; y_len[m]++
}

proctype OwnerOfY() {
    do
    :: atomic { y_seq < CHANGES_OF_Y -> y[y_seq] = y[y_seq] ^ 2; y_seq++; y_put(0, y_seq, 2); y_put(1, y_seq, 2) }
    :: atomic { y_asked[0] == 1 || y_asked[0] == 2 -> y_put(0, 3 + y_asked[0], y[y_asked[0] - 1]); y_asked[0]++ }
    :: atomic { y_asked[1] == 1 || y_asked[1] == 2 -> y_put(1, 3 + y_asked[1], y[y_asked[1] - 1]); y_asked[1]++ }
    :: atomic { done -> break }
    od
}

proctype NetOfY(byte m) {
    byte k;
    do
    :: atomic { y_ptr[m] < y_len[m] ->
        k = y_kind[m * YLOG + y_ptr[m]];
        if
        :: k <= 2 && k == y_at[m] + 1 ->      /* a difference */
            page[m * 2 + k - 1] = page[m * 2 + k - 1] ^ y_value[m * YLOG + y_ptr[m]];
            if
#ifdef FOLD_MISSES_CHANGES
            :: 0 ->
#else
#ifdef FOLD_TAKES_ALL_CHANGES
            :: folding[m] ->
#else
            :: folding[m] && covered[m] < k ->
#endif
#endif
                copy[m * 2 + k - 1] = copy[m * 2 + k - 1] ^ y_value[m * YLOG + y_ptr[m]]
            :: else -> skip
            fi;
            y_at[m] = k
        :: k > 3 && folding[m] && (k - 4 == covered[m]
#ifdef CONTENTS_TWICE
            || k - 4 < covered[m]
#endif
            ) ->                              /* contents: as of exactly this point of the stream */
            assert(y_then[m * YLOG + y_ptr[m]] <= y_at[m]);
            copy[m * 2 + k - 4] = copy[m * 2 + k - 4] ^ y_value[m * YLOG + y_ptr[m]];
            if :: k - 4 == covered[m] -> covered[m]++ :: else -> skip fi
        :: else -> skip                       /* a repeat */
        fi;
        y_ptr[m]++; k = 0 }
    :: atomic { !y_again[m] && y_ptr[m] > 0 && CHANGES_OF_Y > 0 -> y_again[m] = 1; y_ptr[m] = 0 }
    :: atomic { done -> break }
    od
}

/* At most two are lost, and m = 2 bears it: what remains can be recovered. */
proctype Master() {
    do
    :: atomic { losses < 2 && owner == 1 && named != 0 ->                /* ps 0 */
           losses++;
#ifdef PROMOTES_DROPPED_MIRROR
           owner = 2
#else
           if :: HAS(named, 0) -> owner = 2 :: else -> owner = 3 fi
#endif
           }
    :: atomic { losses < 2 && HAS(named, 0) && HAS(named, 1) ->          /* ps 1, maybe in mid-recovery */
           losses++; named = named & 2; if :: owner == 2 -> owner = 3 :: else -> skip fi }
    :: atomic { losses < 2 && HAS(named, 0) && HAS(named, 1) ->          /* ps 2 */
           losses++; named = named & 1 }
    :: atomic { done -> break }
    od
}

init {
    byte n, s;
    atomic {
        y[0] = 1; y[1] = 1;
        page[0] = 1; page[1] = 1; page[2] = 1; page[3] = 1;
        need[1] = 3; serving[1] = 1; fence[0] = 1; fence[1] = 1;
        run First(); run Recovered(2); run Recovered(3);
        run Net(0); run Net(1); run OwnerOfY(); run NetOfY(0); run NetOfY(1); run Master()
    }
    timeout ->
    /* At rest: nothing waits, every push is there once, and mirrors that are named equal X + Y. */
    atomic {
        assert(serving[owner] && seq[owner] == PUSHES && acked == PUSHES);
        n = 0;
        do
        :: n < PUSHES -> assert(who[G(owner, n)] == acked_who[n]); n++
        :: else -> break
        od;
        n = 0;
        do
        :: n < 2 ->
            if
            :: HAS(named, n) && !(owner == n + 2) && !(owner == 3 && n == 0) ->
                assert(at[n] == seq[owner]);
                assert(page[n * 2] == (x[owner * 2] ^ y[0]));
                assert(page[n * 2 + 1] == (x[owner * 2 + 1] ^ y[1]))
            :: else -> skip
            fi;
            n++
        :: else -> break
        od;
        done = 1
    }
}
