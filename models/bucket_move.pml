/* The bucket move: a bucket goes to another ps while it is trained, and either end may be lost at any moment.
 *
 * Bucket X is served by life 1 at ps 0. A move mirror at ps 1 gets its contents in pieces, in one order with the
 * differences; once it is complete the master makes ps 1 the owner: it asks ps 0 to hand over, levels the other mirror
 * (a replica at ps 2), promotes its own (life 2), and then ps 0 may drop the bucket. If the new owner is lost the
 * replica is promoted (life 3). "Lost" is what the master says; the process may go on as a zombie, and workers with old
 * maps push to any life that still serves. -DNO_REPLICA: no other mirror (parity off), and nobody is lost once the map
 * has switched.
 *
 * Contents are XORs, as in parity_cut.pml: push p by life L writes L at its own two bits of slot p%2.
 *
 * Checked: what was acknowledged is in every later life as the same change; the moved bytes are the owner's; nobody is
 * stuck: at rest the last owner serves, all pushes are in it once, and the mirrors that are named equal it.
 */

#ifndef PUSHES
#define PUSHES 3
#endif
#define BITS(p, id) ((id) << (((p) >> 1) * 2))
#define SLOT(p) ((p) & 1)
#define G(a, p) ((a) * PUSHES + (p))

byte seq[4];
byte x[8];            /* [life * 2 + slot] */
byte who[4 * PUSHES];
bool serving[4];
bool needs_move[4];   /* mirrors that this life knows of: the move mirror, the replica */
bool needs_copy[4];
byte known[4];        /* owner, as this life's placement says */
bool handed;          /* ps 0 answered HandOver with all confirmed */
bool dropped;         /* ps 0 dropped the bucket */

/* the move mirror at ps 1, and the stream to it */
#define LOG (PUSHES + 3)
byte kind[LOG];       /* 1: difference; 2, 3: contents of slot 0, 1; 4: marks */
byte nth[LOG];        /* of a difference: its seq; of contents: the bucket's seq when they were read */
byte value[LOG];
byte filled, ptr;
bool again;
byte asked;           /* pieces put into the stream + 1; 0: not wanted */
byte covered;
bool complete;
byte move_at;
byte move_page[2];
byte move_who[PUSHES];
byte move_given;
byte move_source = 1; /* life whose differences are taken */

/* the replica at ps 2 */
byte copy_at;
byte copy_page[2];
byte copy_who[PUSHES];
byte copy_given[4];
byte copy_source = 1;

/* the master */
byte owner = 1;
bool named_move = 1;
#ifdef NO_REPLICA
bool named_copy = 0;
#define MAX_LOSSES 0
#else
bool named_copy = 1;
#ifndef MAX_LOSSES
#define MAX_LOSSES 1
#endif
#endif
byte losses;
bool lost0, lost1;
bool told;            /* MirrorReady reached the master */
bool ready;           /* BucketsReady did */
bool done;

byte acked;
byte acked_who[PUSHES];

#define CONFIRMED(L, n) ((!needs_move[L] || (L == 1 && move_given >= (n))) && (!needs_copy[L] || copy_given[L] >= (n)))

inline push(L) {
    x[L * 2 + SLOT(seq[L])] = x[L * 2 + SLOT(seq[L])] ^ BITS(seq[L], L);
    who[G(L, seq[L])] = L; seq[L]++
}

inline check(L) {
    assert(seq[L] >= acked);
    n = 0; s = 0; t = 0;
    do
    :: n < seq[L] ->
        assert(n >= acked || who[G(L, n)] == acked_who[n]);
        if :: SLOT(n) == 0 -> s = s ^ BITS(n, who[G(L, n)]) :: else -> t = t ^ BITS(n, who[G(L, n)]) fi;
        n++
    :: else -> break
    od;
    assert(x[L * 2] == s && x[L * 2 + 1] == t);
    n = 0; s = 0; t = 0
}

#define FLUSHED ((lost1 || move_source != 1 || !complete || move_given == seq[1]) && (!named_copy || copy_source != 1 || copy_given[1] == seq[1]))

/* ---- ps 0 */
proctype Source() {
    do
    :: atomic { serving[1] && seq[1] < PUSHES ->
           push(1);
           if
           :: asked > 0 -> kind[filled] = 1; nth[filled] = seq[1]; value[filled] = BITS(seq[1] - 1, 1); filled++
           :: else -> skip
           fi }
    :: atomic { serving[1] && acked < seq[1] && CONFIRMED(1, acked + 1) -> acked_who[acked] = who[G(1, acked)]; acked++ }
    /* contents, a piece at a time, in the stream of the differences */
    :: atomic { serving[1] && asked > 0 && asked < 4 ->
           kind[filled] = asked + 1; nth[filled] = seq[1];
           if :: asked < 3 -> value[filled] = x[2 + asked - 1] :: else -> skip fi;
           filled++; asked++ }
    /* placements */
    :: atomic { serving[1] && owner == 1 && needs_move[1] && !named_move -> needs_move[1] = 0 }
    :: atomic { known[1] != owner && owner != 1 -> known[1] = owner;
#ifndef SERVES_AFTER_HAND_OVER
           serving[1] = 0;
#endif
#ifdef DROPS_EARLY
           dropped = 1
#endif
           }
    :: atomic { known[1] == 1 && owner == 1 && !serving[1] -> serving[1] = 1 }
    /* hand over: all that it ever sent is confirmed, or refused, by the mirrors that live */
    :: atomic { known[1] != 1 && !handed && !dropped && FLUSHED -> handed = 1 }
    :: atomic { handed && ready && !dropped -> dropped = 1 }
    :: atomic { done -> break }
    od
}

/* ---- the stream to ps 1 */
proctype Stream() {
    byte k;
    do
    :: atomic { ptr < filled && !(dropped && !serving[1]) ->
        k = kind[ptr];
        if
        :: move_source != 1 -> skip                        /* refused */
        :: move_source == 1 && k == 1 ->
            if
            :: nth[ptr] == move_at + 1 ->
                move_at = nth[ptr]; move_who[move_at - 1] = 1;
                if   /* a row whose contents are still to come is left alone */
                :: covered > SLOT(move_at - 1) -> move_page[SLOT(move_at - 1)] = move_page[SLOT(move_at - 1)] ^ value[ptr]
                :: else -> skip
                fi
            :: covered == 0 && asked > 0 && nth[ptr] > move_at + 1 -> skip
            :: else -> skip                                /* a repeat */
            fi
        :: move_source == 1 && (k == 2 || k == 3) ->
            if
            :: covered == k - 2 ->
                if   /* the first piece says where the bucket is */
                :: k == 2 && nth[ptr] > move_at ->
                    do
                    :: move_at < nth[ptr] -> move_who[move_at] = who[G(1, move_at)]; move_at++
                    :: else -> break
                    od
                :: else -> skip
                fi;
                move_page[k - 2] = move_page[k - 2] ^ value[ptr]; covered++
#ifdef CONTENTS_TWICE
            :: covered > k - 2 && !complete -> move_page[k - 2] = move_page[k - 2] ^ value[ptr]
#endif
            :: else -> skip
            fi
        :: move_source == 1 && k == 4 -> if :: covered == 2 -> complete = 1 :: else -> skip fi
        fi;
        if :: move_source == 1 && complete -> move_given = move_at :: else -> skip fi;
        ptr++; k = 0 }
    :: atomic { !again && ptr > 0 -> again = 1; ptr = 0 }   /* a lost connection: said again */
    :: atomic { asked == 0 && owner == 1 && named_move && serving[1] && !lost1 -> asked = 1 }   /* Want */
    :: atomic { complete && !told -> told = 1 }
#ifdef CONTENTS_BESIDE_THE_STREAM
    :: atomic { asked == 4 && ptr < filled && kind[ptr] == 1 && ptr + 1 < filled && kind[ptr + 1] > 1 ->
           k = kind[ptr]; kind[ptr] = kind[ptr + 1]; kind[ptr + 1] = k;
           k = nth[ptr]; nth[ptr] = nth[ptr + 1]; nth[ptr + 1] = k;
           k = value[ptr]; value[ptr] = value[ptr + 1]; value[ptr + 1] = k; k = 0 }
#endif
    :: atomic { done -> break }
    od
}

/* ---- differences to the replica: from any life that serves or served, again and late */
proctype ToCopy() {
    byte n;
    do
    :: atomic { named_copy && copy_source == 1 && seq[1] > copy_at ->
           n = copy_at; copy_page[SLOT(n)] = copy_page[SLOT(n)] ^ BITS(n, who[G(1, n)]); copy_who[n] = who[G(1, n)];
           copy_at++; copy_given[1] = copy_at; n = 0 }
    :: atomic { named_copy && copy_source <= 2 && seq[2] > copy_at && serving[2] ->
           n = copy_at; copy_page[SLOT(n)] = copy_page[SLOT(n)] ^ BITS(n, who[G(2, n)]); copy_who[n] = who[G(2, n)];
           copy_at++; copy_given[2] = copy_at; n = 0 }
    :: atomic { serving[2] && copy_source <= 2 && copy_given[2] < copy_at && seq[2] >= copy_at -> copy_given[2] = copy_at }
    :: atomic { done -> break }
    od
}

/* ---- ps 1 becomes the owner */
proctype Destination() {
    byte n, s, t;
    atomic { owner == 2 -> known[2] = 2 };
#ifndef NO_HAND_OVER
    atomic { lost0 || handed -> skip };
#endif
    move_source = 2;
#ifndef NO_LEVELLING
    if
    :: atomic { named_copy && copy_source <= 2 ->          /* Tail, with its fence */
           copy_source = 2;
           do
           :: move_at < copy_at ->
               n = move_at;
               move_page[SLOT(n)] = move_page[SLOT(n)] ^ BITS(n, copy_who[n]); move_who[n] = copy_who[n]; move_at++
           :: else -> break
           od;
           n = 0 }
    :: atomic { !named_copy -> skip }
    fi;
#endif
    atomic {
        n = 0;
        do
        :: n < move_at -> who[G(2, n)] = move_who[n]; n++
        :: else -> break
        od;
        seq[2] = move_at; x[4] = move_page[0]; x[5] = move_page[1]; needs_copy[2] = named_copy;
        if :: owner == 2 -> check(2) :: else -> skip fi;
        n = 0; serving[2] = 1
    };
    do
    :: atomic { serving[2] && seq[2] < PUSHES -> push(2) }
    :: atomic { serving[2] && acked < seq[2] && CONFIRMED(2, acked + 1) -> acked_who[acked] = who[G(2, acked)]; acked++ }
    :: atomic { serving[2] && owner == 2 && !ready -> ready = 1 }
    :: atomic { serving[2] && owner != 2 -> serving[2] = 0; break }
    :: atomic { done -> break }
    od
}

/* ---- ps 2 becomes the owner */
proctype Replica() {
    byte n, s, t;
    atomic { owner == 3 -> known[3] = 3 };
    /* if whom it took differences from lives, that one hands over */
    atomic { lost0 || handed || copy_source != 1 -> skip };
    copy_source = 3;
    atomic {
        n = 0;
        do
        :: n < copy_at -> who[G(3, n)] = copy_who[n]; n++
        :: else -> break
        od;
        seq[3] = copy_at; x[6] = copy_page[0]; x[7] = copy_page[1];
        check(3);
        serving[3] = 1; ready = 1
    };
    do
    :: atomic { serving[3] && seq[3] < PUSHES -> push(3) }
    :: atomic { serving[3] && acked < seq[3] -> acked_who[acked] = who[G(3, acked)]; acked++ }
    :: atomic { done -> break }
    od
}

#ifdef SWITCHES_EARLY
#define MAY_SWITCH (asked > 0)
#else
#define MAY_SWITCH told
#endif
proctype Master() {
    do
    :: atomic { owner == 1 && named_move && !lost1 && !lost0 && MAY_SWITCH -> owner = 2 }
    :: atomic { losses < MAX_LOSSES && !lost0 && !ready ->                      /* ps 0 */
           losses++; lost0 = 1;
           if
           :: owner == 1 && told -> owner = 2
           :: owner == 1 -> owner = 3; named_move = 0
           :: else -> skip
           fi }
    :: atomic { losses < MAX_LOSSES && !lost1 && !lost0 && owner < 3 ->         /* ps 1 */
           losses++; lost1 = 1; named_move = 0;
           if
#ifdef GOES_BACK
           :: owner == 2 -> owner = 1
#else
           :: owner == 2 -> owner = 3
#endif
           :: else -> skip
           fi }
    :: atomic { done -> break }
    od
}

init {
    byte n;
    atomic {
        needs_move[1] = 1; needs_copy[1] = named_copy; serving[1] = 1; known[1] = 1;
#ifdef NO_REPLICA
        needs_move[1] = 0;   /* a push is acknowledged by the owner alone: only the hand-over keeps it */
#endif
        run Source(); run Stream(); run ToCopy(); run Destination(); run Replica(); run Master()
    }
    timeout ->
    atomic {
        assert(serving[owner] && seq[owner] == PUSHES && acked == PUSHES);
        n = 0;
        do
        :: n < PUSHES -> assert(who[G(owner, n)] == acked_who[n]); n++
        :: else -> break
        od;
        assert(!named_copy || owner == 3 || (copy_page[0] == x[owner * 2] && copy_page[1] == x[owner * 2 + 1]));
        assert(owner == 1 || lost0 || dropped);
        done = 1
    }
}
