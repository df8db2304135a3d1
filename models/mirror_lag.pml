/* Mirrors that may be behind: the changes of a partition stay open until one difference is made of them.
 *
 * Partition X lives at ps 0, with mirror 0 at ps 1 and mirror 1 at ps 2. Each life of X (1: the owner at ps 0; 2: at
 * ps 1 from mirror 0; 3: at ps 2 from mirror 1) may be a zombie, as in parity_cut.pml, and differences may come to a
 * mirror at any moment after they were made. A push is acknowledged when it is applied. A shard of PUSHES batches is
 * done when the owner has all of them. It is released, and then never trained again, when all mirrors that the owner
 * has to tell have every change that was open or closed when it was done. After a loss it is opened again unless it is
 * released, and workers train from the watermark on.
 *
 * Modelled: open changes, which have their number from the first push on; flushes at any moment, of any number of
 * pushes; levelling of mirrors at different differences; a second loss. Sums over several members of a stripe are
 * parity_cut's.
 *
 * Contents are real XORs: push p by life L writes L at its own two bits of slot p%2. So a change that is in two
 * differences, or in none, shows in the bytes.
 *
 * Checked: whatever a mirror has are the pushes below its own watermark, each once; nothing that was released is
 * lacking in a later life; at rest the shard is released, every push is there once, and mirrors equal the owner.
 */

#ifndef PUSHES
#define PUSHES 3
#endif
#define BITS(p, id) ((id) << (((p) >> 1) * 2))
#define SLOT(p) ((p) & 1)
#define G(a, p) ((a) * PUSHES + (p))
#define HAS(set, m) (((set) >> (m)) & 1)

#define DOING 0
#define DONE 1
#define RELEASED 2

/* X as each life holds it; index 0 unused */
byte mark[4];         /* the watermark: pushes applied */
byte x[8];            /* [life * 2 + slot] */
byte old[8];          /* the same when the newest difference was made */
byte who[4 * PUSHES]; /* which life made push p, as this life believes */
byte seq[4];          /* differences made */
bool open[4];         /* there is a change that no difference has; its number is seq + 1 */
byte first[4];        /* the watermark after the first push of it */
bool late[4];         /* a push was applied that opened nothing yet */
bool serving[4];
byte need[4];         /* mirrors that this life's placement names: bit m */
byte given[8];        /* [life * 2 + mirror]: the newest answer of that mirror to this life */
byte diff[8 * PUSHES];   /* [(life * PUSHES + difference) * 2 + slot] */
byte diff_mark[4 * PUSHES];

/* the mirrors */
byte at[2];           /* differences applied */
byte m_mark[2];
byte page[4];         /* [mirror * 2 + slot] */
byte has[2 * PUSHES]; /* which life's push p */
byte fence[2];        /* differences are taken from this life or later ones */
byte log_page[4 * PUSHES];  /* [(mirror * PUSHES + difference) * 2 + slot]: kept to level the other one */
byte log_mark[2 * PUSHES];

/* the master */
byte owner = 1;
byte named = 3;
byte losses;
byte state;           /* of the shard */
byte done_life;
byte done_seq;        /* the newest change when it was done */
bool over;            /* the check at rest passed */

#define OTHERS(life) (life == 1 -> named : (life == 2 -> (named & 2) : 0))
#define HAVE(life, n) ((!HAS(need[life], 0) || given[life * 2] >= n) && (!HAS(need[life], 1) || given[life * 2 + 1] >= n))
#define ONE_HAS(life, n) (need[life] == 0 || (HAS(need[life], 0) && given[life * 2] >= n) || (HAS(need[life], 1) && given[life * 2 + 1] >= n))

/* What mirror m has, slot by slot, is the pushes below its watermark. */
inline check(m) {
    s = 0; k = 0;
    do
    :: k < m_mark[m] -> if :: SLOT(k) == 0 -> s = s ^ BITS(k, has[G(m, k)]) :: else -> skip fi; k++
    :: else -> break
    od;
    assert(page[m * 2] == s);
    s = 0; k = 0;
    do
    :: k < m_mark[m] -> if :: SLOT(k) == 1 -> s = s ^ BITS(k, has[G(m, k)]) :: else -> skip fi; k++
    :: else -> break
    od;
    assert(page[m * 2 + 1] == s);
    s = 0; k = 0
}

/* Difference number at[m] of life L comes to mirror m. */
inline take(m, L) {
    n = at[m];
    page[m * 2] = page[m * 2] ^ diff[G(L, n) * 2];
    page[m * 2 + 1] = page[m * 2 + 1] ^ diff[G(L, n) * 2 + 1];
    log_page[G(m, n) * 2] = diff[G(L, n) * 2]; log_page[G(m, n) * 2 + 1] = diff[G(L, n) * 2 + 1];
    log_mark[G(m, n)] = diff_mark[G(L, n)];
    k = m_mark[m];
    do
    :: k < diff_mark[G(L, n)] -> has[G(m, k)] = who[G(L, k)]; k++
    :: else -> break
    od;
    m_mark[m] = diff_mark[G(L, n)];
    at[m] = n + 1; given[L * 2 + m] = n + 1;
    n = 0; k = 0;
    check(m)
}

proctype Net(byte m) {
    byte n, s, k;
    do
    :: atomic { seq[1] > at[m] && fence[m] <= 1 -> take(m, 1) }
    :: atomic { m == 1 && HAS(need[2], 1) && seq[2] > at[m] && fence[m] <= 2 && serving[2] -> take(m, 2) }
    /* said again: a repeat is answered with what is there */
    :: atomic { m == 1 && serving[2] && fence[m] <= 2 && given[4 + m] < at[m] && seq[2] >= at[m] -> given[4 + m] = at[m] }
    :: atomic { over -> break }
    od
}

inline opens(L) {
    if :: !open[L] -> open[L] = 1; first[L] = mark[L] :: else -> skip fi
}

/* One difference of all changes that are open. */
inline flush(L) {
    n = seq[L];
#ifdef NEWEST_PUSH_ONLY
    diff[G(L, n) * 2] = 0; diff[G(L, n) * 2 + 1] = 0;
    diff[G(L, n) * 2 + SLOT(mark[L] - 1)] = BITS(mark[L] - 1, L);
#else
    diff[G(L, n) * 2] = x[L * 2] ^ old[L * 2]; diff[G(L, n) * 2 + 1] = x[L * 2 + 1] ^ old[L * 2 + 1];
#endif
#ifdef OLD_MARKS
    diff_mark[G(L, n)] = first[L];
#else
    diff_mark[G(L, n)] = mark[L];
#endif
#ifndef KEEPS_OLD_RECORDS
    old[L * 2] = x[L * 2]; old[L * 2 + 1] = x[L * 2 + 1];
#endif
    seq[L] = n + 1; open[L] = 0; n = 0
}

inline serve(L) {
    do
    /* a push at the watermark is applied, and acknowledged; workers with old maps reach zombies too */
    :: atomic { serving[L] && mark[L] < PUSHES && state == DOING ->
           x[L * 2 + SLOT(mark[L])] = x[L * 2 + SLOT(mark[L])] ^ BITS(mark[L], L);
           who[G(L, mark[L])] = L; mark[L]++;
#ifdef OPENED_LATER
           late[L] = 1
#else
           opens(L)
#endif
           }
#ifdef OPENED_LATER
    :: atomic { late[L] -> late[L] = 0; opens(L) }
#endif
    :: atomic { open[L] && seq[L] < PUSHES -> flush(L) }
    /* the newest placement reaches this life: it may never do so at a zombie */
    :: atomic { serving[L] && owner == L && need[L] != OTHERS(L) -> need[L] = OTHERS(L) }
    :: atomic { serving[L] && owner != L -> serving[L] = 0; break }
    :: atomic { over -> break }
    od
}

proctype First() {
    byte n;
    serve(1)
}

/* Life L is made from mirror m = L - 2; the other mirror is brought to the same difference first, if it is named. */
proctype Recovered(byte L) {
    byte m, n, s, k;
    atomic { owner == L -> m = L - 2; fence[m] = L }
#ifndef NO_LEVELLING
    if
    :: atomic { L == 2 && HAS(named, 1) && fence[1] <= 2 ->
#ifndef LEVELLING_DOES_NOT_FENCE
           fence[1] = 2;
#endif
           do
           :: at[0] < at[1] ->
               n = at[0];
               page[0] = page[0] ^ log_page[G(1, n) * 2]; page[1] = page[1] ^ log_page[G(1, n) * 2 + 1];
               log_page[n * 2] = log_page[G(1, n) * 2]; log_page[n * 2 + 1] = log_page[G(1, n) * 2 + 1];
               log_mark[n] = log_mark[G(1, n)];
               k = m_mark[0];
               do
               :: k < log_mark[n] -> has[k] = has[G(1, k)]; k++
               :: else -> break
               od;
               m_mark[0] = log_mark[n]; at[0] = n + 1
           :: else -> break
           od;
           n = 0; k = 0;
           /* what the other one lacks goes there */
           do
           :: at[1] < at[0] ->
               n = at[1];
               page[2] = page[2] ^ log_page[n * 2]; page[3] = page[3] ^ log_page[n * 2 + 1];
               log_page[G(1, n) * 2] = log_page[n * 2]; log_page[G(1, n) * 2 + 1] = log_page[n * 2 + 1];
               log_mark[G(1, n)] = log_mark[n];
               k = m_mark[1];
               do
               :: k < log_mark[n] -> has[G(1, k)] = has[k]; k++
               :: else -> break
               od;
               m_mark[1] = log_mark[n]; at[1] = n + 1
           :: else -> break
           od;
           n = 0; k = 0; given[4 + 1] = at[1]; check(0); check(1) }
    :: atomic { L == 3 || !HAS(named, 1) -> skip }
    fi;
#else
    atomic { L == 2 && fence[1] < L -> fence[1] = L };
#endif
    atomic {
        check(m);
        x[L * 2] = page[m * 2]; x[L * 2 + 1] = page[m * 2 + 1];
        old[L * 2] = page[m * 2]; old[L * 2 + 1] = page[m * 2 + 1];
        mark[L] = m_mark[m]; seq[L] = at[m];
        do
        :: n < mark[L] -> who[G(L, n)] = has[G(m, n)]; n++
        :: else -> break
        od;
        n = 0;
        need[L] = OTHERS(L);
        serving[L] = 1;
        /* nobody would train it again */
        if :: owner == L && state == RELEASED -> assert(mark[L] == PUSHES) :: else -> skip fi
    };
    serve(L)
}

inline lost(next) {
    losses++; owner = next;
#ifndef LOSS_COSTS_NOTHING
    if :: state == DONE -> state = DOING :: else -> skip fi
#else
    if :: state == DONE -> done_life = next; done_seq = 0 :: else -> skip fi
#endif
}

/* At most two are lost, and m = 2 bears it: what remains can be recovered. */
proctype Master() {
    do
    :: atomic { state == DOING && serving[owner] && mark[owner] == PUSHES ->
           state = DONE; done_life = owner; done_seq = seq[owner] + open[owner] }
#ifdef DONE_OF_A_ZOMBIE
    :: atomic { state == DOING && serving[1] && mark[1] == PUSHES ->
           state = DONE; done_life = owner; done_seq = 0 }
#endif
    :: atomic { state == DONE && done_life == owner && serving[owner] && need[owner] == OTHERS(owner) &&
#ifdef RELEASED_WHEN_DONE
           1
#else
#ifdef RELEASED_WHEN_SENT
           seq[owner] >= done_seq
#else
#ifdef RELEASED_BY_ONE_MIRROR
           seq[owner] >= done_seq && ONE_HAS(owner, done_seq)
#else
           seq[owner] >= done_seq && HAVE(owner, done_seq)
#endif
#endif
#endif
           -> state = RELEASED }
    :: atomic { losses < 2 && owner == 1 && named != 0 ->                /* ps 0 */
           if :: HAS(named, 0) -> lost(2) :: else -> lost(3) fi }
    :: atomic { losses < 2 && HAS(named, 0) && HAS(named, 1) ->          /* ps 1 */
           named = named & 2; if :: owner == 2 -> lost(3) :: else -> losses++ fi }
    :: atomic { losses < 2 && HAS(named, 0) && HAS(named, 1) ->          /* ps 2 */
           losses++; named = named & 1 }
    :: atomic { over -> break }
    od
}

init {
    byte n;
    atomic {
        need[1] = 3; serving[1] = 1; fence[0] = 1; fence[1] = 1;
        run First(); run Recovered(2); run Recovered(3); run Net(0); run Net(1); run Master()
    }
    timeout ->
    /* At rest: nothing waits, every push is there once, and mirrors that are named equal the owner. */
    atomic {
        assert(serving[owner] && mark[owner] == PUSHES && state == RELEASED);
        do
        :: n < 2 ->
            if
            :: HAS(named, n) && !(owner == n + 2) && !(owner == 3 && n == 0) ->
                assert(m_mark[n] == mark[owner] && at[n] == seq[owner]);
                assert(page[n * 2] == x[owner * 2]);
                assert(page[n * 2 + 1] == x[owner * 2 + 1])
            :: else -> skip
            fi;
            n++
        :: else -> break
        od;
        over = 1
    }
}
