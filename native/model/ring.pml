/* A model of the native core for spin (https://spinroot.com). Sequentially consistent: the memory orders are argued in the headers.
 *
 * A labelled step here (E8, T5, ...) is the step with that label in ring.h, producer.h, consumer.h; K2, K3 are Finder::look_at_all() and
 * B1..B4 sweep(), admit() and the bells. A process may pause for ever so long, or die, before any step. Ghost variables (g..., n...)
 * record what really happened; no step reads them, the asserts and the choice of what to ask for do.
 *
 *     Worker(p)   claims, publishes, retries, gives back, ends; dies; the keeper's recover() and the successor's constructor follow
 *                 in the same process, since nothing of a worker runs beside its own recovery
 *     Taker       attaches, takes, delivers, releases, waits; dies or closes, and its successor attaches
 *     Admitter    sweeps, admits, rings
 *     OldLease    leases that outlive the Consumer which made them (CLOSES)
 *
 * Bounds (-D):   P workers, C cells, E entries, D descriptors a worker, NT tickets, NMAX of get(n); TM, SM: moduli of lap tag and
 *                sequence (SM=1 switches the sequence off, where the tags do not wrap); MORTALS: workers 0.. that may die or stop;
 *                how often at most: DEATHS, TDEATHS, CUTS (of recover), CLOSES, STOPS (for ever), RETRIES, GIVES, ENDS
 * Variants:      SLEEP (the taker sleeps; else it polls), IDLE (workers sleep), TICKETS (ticket order), COUNT (deaths in the word),
 *                ADMITTER (a process of its own; else a delivery admits the next ticket), SWEEPER (that in single steps; implied by
 *                ENDS and IDLE), TABLE (single steps of look_at_all()),
 *                LOST (the dead have no successor), OTHERPROC (OldLease beside the adoption, as from another process)
 * Mutations:     M_..., each with the property that it breaks in check.py
 */
#ifndef P
#define P 2
#endif
#ifndef C
#define C 2
#endif
#ifndef E
#define E 2
#endif
#ifndef D
#define D 2
#endif
#ifndef NT
#define NT 3
#endif
#ifndef NMAX
#define NMAX 1
#endif
#ifndef TM
#define TM 16
#endif
#ifndef SM
#define SM 1
#endif
#ifndef MORTALS
#define MORTALS 1
#endif
#ifndef DEATHS
#define DEATHS 0
#endif
#ifndef TDEATHS
#define TDEATHS 0
#endif
#ifndef CUTS
#define CUTS 0
#endif
#ifndef CLOSES
#define CLOSES 0
#endif
#ifndef STOPS
#define STOPS 0
#endif
#ifndef RETRIES
#define RETRIES 0
#endif
#ifndef GIVES
#define GIVES 0
#endif
#ifndef ENDS
#define ENDS 0
#endif
#if ENDS>0 || defined(IDLE)
#define SWEEPER
#endif
#define SLOTS  (P*D)
#define NONE   255
#define NEVER  255                              /* kNever */

/* index cell {tag:4, worker:2, descriptor:2, sequence:5} */
#define TAG(t)         (((t)/C+1)%TM)
#define PREV(t)        (((t)/C+TM)%TM)
#ifdef M_NO_SEQUENCE
#define CELL(t,p,d,s)  ((TAG(t)<<9)|((p)<<7)|((d)<<5))
#else
#define CELL(t,p,d,s)  ((TAG(t)<<9)|((p)<<7)|((d)<<5)|(s))
#endif
#define CTAG(w)        (((w)>>9)&15)
#define CWORKER(w)     (((w)>>7)&3)
#define CDESC(w)       (((w)>>5)&3)
#define FILLED(t)      (CTAG(cell[(t)%C])==TAG(t))

/* table word {state:3, worker:2, attempt:2, deaths:2, generation:3}; + 1 goes READY -> RUNNING -> PUBLISHING -> DONE */
#define FREE       0
#define READY      1
#define RUNNING    2
#define PUBLISHING 3
#define DONE       4
#define FILTERED   5
#define STATE(w)   ((w)&7)
#define OWNER(w)   (((w)>>3)&3)
#define ATTEMPT    32
#define DEATH      128
#ifdef M_NO_GENERATION
#define NEXTGEN(w) 0
#else
#define NEXTGEN(w) ((((w)>>9)+1)<<9)
#endif

/* descriptor word {state:2, epoch} */
#define DFREE      0
#define DTAKEN     1
#define DRELEASED  2
#if CLOSES>0
#define TAKENBY(x) (DTAKEN|((x)<<2))
#else
#define TAKENBY(x) DTAKEN                       /* the dead release nothing: no epoch is needed */
#endif

short cell[C]; byte tail, head;                 /* shared: the index */
short word[E]; byte rec[E];                     /* shared: table words; records (ticket + 1) */
byte  dw[SLOTS], dpos[SLOTS];                   /* shared: descriptors: word, position, */
byte  payload[SLOTS], dentry[SLOTS];            /*         payload (ticket + 1), entry, */
short dtw[SLOTS];                               /*         table_word */
byte  seq[P];                                   /* shared: Control.sequence */
byte  wake_at = NEVER; bit news, asleep;        /* news: wake_sequence is not the taker's `seen` any more (one taker: a bit is exact) */
byte  epoch;
#ifdef IDLE
byte  idle; bit rung[P], abell;
#endif
byte  nexttk;                                   /* Admitter: tickets so far */

byte  deaths, tdeaths, cuts, closes, stops, retries, gives, ends;
byte  gpub, gdel, gend;                         /* ghosts, sets of tickets: published, delivered, ended otherwise */
byte  npub, ndel, nend, nstuck;
byte  gtk[SLOTS], gpos[SLOTS];                  /* ghosts: ticket + 1 of the live group in this descriptor (0: none), its position */
#if CLOSES>0
byte  old[SLOTS]; bit adopting;
#endif

#define IN(set,tk)  (((set)>>((tk)-1))&1)
#define PUT(set,tk) set=set|(1<<((tk)-1))
#define ALLDONE     (ndel+nend+nstuck==NT)
/* What a descriptor that is not live holds is never read: forgotten here, to save states. */
#define FORGET(x)   payload[x]=0; dtw[x]=0; dentry[x]=0; dpos[x]=0; gpos[x]=0
#define ADMIT(e)    nexttk++; rec[e]=nexttk; word[e]=NEXTGEN(word[e])|READY

/* ------------------------------------------------------------------------------------------------------------------- worker */
#define CLEAR w=0; cw=0; d=0; t=0; e=0; i=0; tk=0; ok=0; wk=NEVER; stale=0
#if DEATHS>0 && defined(M_UNPROVEN)             /* recovered while it lives */
#define DIE(x) :: atomic { deaths<DEATHS && p<MORTALS -> deaths++; run Keeper(p); x }
#elif DEATHS>0
#define DIE(x) :: atomic { deaths<DEATHS && p<MORTALS -> deaths++; CLEAR; live=0; goto dead }
#else
#define DIE(x)
#endif
#define HOLDS(e) ((OWNER(word[e])==p && (STATE(word[e])==RUNNING || (STATE(word[e])==PUBLISHING && !IN(gpub,rec[e]))))->1:0)
#if E==1
#define HELD     HOLDS(0)
#define ANYREADY (STATE(word[0])==READY)
#elif E==2
#define HELD     (HOLDS(0)+HOLDS(1))
#define ANYREADY (STATE(word[0])==READY||STATE(word[1])==READY)
#else
#define HELD     (HOLDS(0)+HOLDS(1)+HOLDS(2))
#define ANYREADY (STATE(word[0])==READY||STATE(word[1])==READY||STATE(word[2])==READY)
#endif
#if STOPS>0
#define STOP :: atomic { stops<STOPS && p<MORTALS -> stops++; nstuck=HELD; CLEAR; goto end_stopped }
#else
#define STOP
#endif
#define ST(x) if :: atomic { x } DIE(x) STOP fi
#if CUTS>0
#define CUT :: atomic { cuts<CUTS -> cuts++; CLEAR; live=0; goto dead }
#else
#define CUT
#endif
#define RS(x) if :: atomic { x } CUT fi

#define s (p*D+d)
#define REUSABLE(x) (!((live>>(x))&1) || dw[p*D+(x)]==DRELEASED)
#if D==1
#define ROOM  REUSABLE(0)
#define NAMED NAMES(0)
#else
#define ROOM  (REUSABLE(0)||REUSABLE(1))
#define NAMED (NAMES(0)||NAMES(1))
#endif

/* live_descriptors(): the index first, then the words */
#ifdef M_INDEX_TO_TAIL
#define BELOW_TAIL && t+i<tail
#else
#define BELOW_TAIL
#endif
#define LIVE_INDEX \
    RS( t=head );                                                                                        /* L1 */ \
    do :: atomic { i<C -> w=cell[(t+i)%C];                                                               /* L2 */ \
                   if :: CTAG(w)==TAG(t+i) && CWORKER(w)==p BELOW_TAIL -> live=live|(1<<CDESC(w)) :: else fi; w=0; i++ } \
       :: atomic { i==C -> i=0; t=0; break } CUT od
#define LIVE_WORDS \
    do :: atomic { i<D -> if :: (dw[p*D+i]&3)==DTAKEN -> live=live|(1<<i)                                /* L3 */ \
                             :: (dw[p*D+i]&3)==DRELEASED -> live=live&~(1<<i) \
                             :: else fi; i++ } \
       :: atomic { i==D -> i=0; break } CUT od
#if defined(M_INDEX_ONLY)
#define LIVE LIVE_INDEX
#elif defined(M_WORDS_ONLY)
#define LIVE LIVE_WORDS
#elif defined(M_WORDS_FIRST)
#define LIVE LIVE_WORDS; LIVE_INDEX
#else
#define LIVE LIVE_INDEX; LIVE_WORDS
#endif
#define CHECK_LIVE \
    do :: i<D -> assert( ((live>>i)&1) || gtk[p*D+i]==0 );                            /* nothing freed */ \
                 assert( !((live>>i)&1) || gtk[p*D+i]!=0 || dw[p*D+i]==DRELEASED );   /* nothing leaked */ \
                 if :: gtk[p*D+i]==0 -> FORGET(p*D+i) :: else fi; i++ \
       :: else -> break od; i=0

/* recover(): does a live descriptor name this very word? (the dead's own memory: nobody writes it) */
#if defined(M_PAIR_NO_ENTRY)
#define NAMES(x) (((live>>(x))&1) && dtw[p*D+(x)]==w)
#elif defined(M_PAIR_NO_WORD)
#define NAMES(x) (((live>>(x))&1) && dentry[p*D+(x)]==e)
#else
#define NAMES(x) (((live>>(x))&1) && dentry[p*D+(x)]==e && dtw[p*D+(x)]==w)
#endif
#ifdef COUNT
#define REISSUED (((w&~31)|READY)+DEATH)
#else
#define REISSUED ((w&~31)|READY)                /* count_death=false: the same words come again */
#endif
#ifdef IDLE
#define R1 RS( idle=idle&~(1<<p) )                    /* R1 */
#ifdef M_RECOVER_NO_BELLS
#define R6
#else
#define R6 RS( rung[0]=1; rung[P-1]=1; abell=1 )       /* R6: the keeper rings all bells */
#endif
#else
#define R1
#define R6
#endif
/* wake_taker(): disarm, then bump, then wake whoever sleeps, armed or not */
#ifdef M_WAKE_IF_ARMED
#define N3 if :: ok -> asleep=0 :: else fi; ok=0
#else
#define N3 asleep=0; ok=0
#endif
#ifdef M_BUMP_FIRST
#define WAKE_TAKER(STEP) STEP( news=1 ); STEP( ok=(wake_at!=NEVER); wake_at=NEVER ); STEP( N3 )
#else
#define WAKE_TAKER(STEP) STEP( ok=(wake_at!=NEVER); wake_at=NEVER ); STEP( news=1 ); STEP( N3 )          /* N1 N2 N3 */
#endif
#if !defined(SLEEP) || defined(M_RECOVER_NO_WAKE)
#define R5 RS( news=1 )
#else
#define R5 WAKE_TAKER(RS)                              /* R5 */
#endif
#ifdef M_UNPROVEN
#define NOT_LEAKED true
#else
#define NOT_LEAKED !(OWNER(word[e])==p && (STATE(word[e])==RUNNING || (STATE(word[e])==PUBLISHING && !IN(gpub,rec[e]))))
#endif
#define RECOVER \
    R1; LIVE; atomic { CHECK_LIVE }; \
    do :: atomic { e<E -> w=word[e];                                                                     /* R2 */ \
                   if :: OWNER(w)==p && (STATE(w)==RUNNING || (STATE(w)==PUBLISHING && !NAMED)) -> goto reissue \
                      :: OWNER(w)==p && STATE(w)==PUBLISHING && NAMED -> assert(IN(gpub,rec[e])) \
                      :: else fi; w=0; e++ } \
       :: atomic { e==E -> e=0; break } CUT \
       :: false -> reissue: \
          RS( if :: word[e]==w -> word[e]=REISSUED; assert(!IN(gpub,rec[e])) :: else fi; w=0; e++ )      /* R3 */ \
       od; \
    RS( t=tail; if :: !FILLED(t) -> t=NONE :: else fi );                                                 /* R4: help_tail */ \
    RS( if :: tail==t -> tail=t+1 :: else fi; t=0 ); \
    R5; R6; \
    atomic { do :: e<E -> assert(NOT_LEAKED); e++ :: else -> break od; e=0; live=0 }

#ifdef M_UNPROVEN
proctype Keeper(byte p) { short w; byte t, e, i, live; bit ok; RECOVER }
#endif

proctype Worker(byte p) {
    short w, cw; byte d, t, e, i, live, tk, wk=NEVER; bit ok, stale;
    goto work;

#if DEATHS>0 && !defined(M_UNPROVEN)
dead:                                           /* the keeper, after the proven death */
    RECOVER;
#ifdef LOST
    goto done;
#else
    LIVE; atomic { CHECK_LIVE };                /* the successor's constructor */
#endif
#endif

work:
    do
    :: atomic { ALLDONE -> goto done }
    DIE(skip) STOP
#ifdef IDLE
    :: atomic { !ALLDONE -> rung[p]=0 };
#ifdef M_LOOK_BEFORE_IDLE
       ST( ok=(ANYREADY && ROOM) ); ST( idle=idle|(1<<p) );
#else
       ST( idle=idle|(1<<p) );                                                                           /* I1: set_idle */
       ST( ok=(ANYREADY && ROOM) );                                                                      /* I2: look again */
#endif
       if :: ok -> ok=0
          :: else -> if :: rung[p] :: ALLDONE DIE(skip) fi; goto work
       fi;
       ST( idle=idle&~(1<<p) );
       if :: atomic { ANYREADY && ROOM } :: atomic { else -> goto work } fi;
#else
    :: atomic { ANYREADY && ROOM };             /* not a step: it spares polling */
#endif
       /* ---- claim */
       atomic { if :: REUSABLE(0) -> d=0                                                                 /* K1: reclaim */
#if D>1
                   :: else -> d=1
#endif
                fi                              /* it may stand with the look above: only this worker leaves RELEASED */
#ifdef TABLE
       };
       do :: e<E -> ST( w=word[e] );                                                                     /* K2 */
                    if :: STATE(w)==READY ->
                          ST( t=rec[e]; if :: tk==0 || t<tk -> tk=t; cw=w; wk=e :: else fi; t=0 )        /* K3 */
                       :: else fi; w=0; e++
          :: else -> break od;
       atomic { e=wk; wk=NEVER; w=0; if :: e==NEVER -> CLEAR; goto work :: else fi };
#else
                ; do :: e<E -> if :: STATE(word[e])==READY && (tk==0 || rec[e]<tk) -> tk=rec[e]; cw=word[e]; wk=e :: else fi; e++
                     :: else -> break od;
                  e=wk; wk=NEVER; if :: e==NEVER -> CLEAR; goto work :: else fi };
#endif
       ST(                                                                                               /* K4: READY -> RUNNING */
#ifndef M_CLAIM_STORE
           if :: word[e]!=cw -> CLEAR; goto work :: else fi;
#endif
           cw=(cw+1)|(p<<3); word[e]=cw;
           assert(rec[e]==tk && !IN(gpub,tk) && !IN(gend,tk)) );
claimed:
       if :: skip
#if RETRIES>0
          :: ST( retries<RETRIES -> retries++; assert(word[e]==cw); word[e]=cw+ATTEMPT; stale=1 );       /* K5: retry */
             /* The old handle publishes now, then the new one does. */
#ifndef M_STALE_PUBLISHES
             atomic { cw=cw+ATTEMPT; stale=0 }  /* alive() refuses the old one */
#endif
#endif
#if GIVES>0
          :: ST( gives<GIVES -> gives++; assert(word[e]==cw); word[e]=(cw&~31)|READY; CLEAR ); goto work /* K6: give_back */
#endif
#if ENDS>0
          :: ST( ends<ENDS -> ends++; assert(word[e]==cw); word[e]=(cw&~7)|FILTERED );                   /* K7: end */
             WAKE_TAKER(ST); atomic { CLEAR }; goto work
#endif
       fi;
       /* ---- publish */
#if !defined(M_FREE_LATE) && !defined(M_NO_FREE)
       ST(                                                                                               /* P1: alive; FREE first */
#ifdef M_UNPROVEN
           if :: word[e]!=cw -> CLEAR; goto work :: else fi;
#endif
           assert(stale || word[e]==cw); dw[s]=DFREE );
#endif
       ST( assert(gtk[s]==0); payload[s]=tk                                                              /* P2: payload, descriptor */
#ifndef M_DESCRIPTOR_LATE
           ; dtw[s]=cw+1; dentry[s]=e
#endif
       );
#ifndef M_PUBLISHING_LATE
#ifdef M_STALE_PUBLISHES
       ST( if :: word[e]==cw -> word[e]=cw+1 :: else fi );
#else
       ST( if :: word[e]==cw -> word[e]=cw+1                                                             /* P3: RUNNING -> PUBLISHING */
              :: else -> CLEAR; goto work fi );
#endif
#endif
#if SM>1
       ST( seq[p]=(seq[p]+1)%SM );                                                                       /* P4: sequence, before use */
#endif
e1:    ST( w=0; t=tail );                                                                                /* E1 */
       ST( w=cell[t%C]                                                                                   /* E2 */
#ifndef M_NO_SECOND_LOAD
       );
       ST( if :: tail!=t -> w=0; goto e1 :: else fi                                                      /* E3 */
#endif
           ; if :: CTAG(w)==TAG(t) -> goto help :: else fi
#ifndef M_NO_TAG_TEST
           ; if :: CTAG(w)!=PREV(t) -> w=0; goto e1 :: else fi                                           /* E5 */
#endif
       );
#ifndef M_NO_HEAD_CHECK
       ST( if :: t-head>=C -> goto noroom :: else fi );                                                    /* E6 */
#endif
       ST(                                                                                               /* E7: the publication */
#ifndef M_CELL_STORE
           if :: cell[t%C]!=w -> w=0; goto e1 :: else fi;
#endif
           w=0; cell[t%C]=CELL(t,p,d,seq[p]);
           assert(npub==t);                     /* the order of these CASes is FIFO: no hole, no overwriting */
           assert(t<head+C);                    /* never over a group that is not taken */
           assert(gtk[s]==0 && payload[s]==tk);
           assert(!IN(gpub,tk));                /* no duplicate */
#ifndef M_PUBLISHING_LATE
           assert(word[e]==cw+1);               /* no stale attempt in the index */
#endif
           gtk[s]=tk; gpos[s]=t; npub++; PUT(gpub,tk) );
#ifdef M_FREE_LATE
       ST( dw[s]=DFREE );
#endif
#ifdef M_DESCRIPTOR_LATE
       ST( dtw[s]=cw+1; dentry[s]=e );
#endif
#ifdef M_PUBLISHING_LATE
       ST( if :: word[e]==cw -> word[e]=cw+1 :: else fi );
#endif
#ifdef SLEEP
#ifdef M_WAKE_WINNER
       ST( if :: tail==t -> tail=t+1 :: else -> live=live|(1<<d); CLEAR; goto work fi );
#else
       ST( if :: tail==t -> tail=t+1 :: else fi );                                                       /* E8: won or lost */
#endif
       ST( if :: wake_at!=NEVER && wake_at<=t+1 -> wk=wake_at :: else -> live=live|(1<<d); CLEAR; goto work fi );   /* F1 */
       ST( if :: wake_at==wk -> wake_at=NEVER :: else -> live=live|(1<<d); CLEAR; goto work fi );        /* F2 */
#ifndef M_FIRE_NO_BUMP
       ST( news=1 );                                                                                     /* F3 */
#endif
       ST( asleep=0; live=live|(1<<d); CLEAR )                                                           /* F4 */
#else
       ST( if :: tail==t -> tail=t+1 :: else fi; live=live|(1<<d); CLEAR )                               /* E8 */
#endif
    :: false ->
help:
#ifdef M_NO_HELP
       ST( tail!=t -> w=0 );
#else
       ST( w=0; if :: tail==t -> tail=t+1 :: else fi );                                                  /* E4 */
#endif
       goto e1
    :: false ->
noroom: ST( w=0; if :: tail!=t -> goto e1 :: else fi );
#if E<=C || defined(M_FEWER_CELLS)
       assert(false);                           /* cells >= entries: the index is never full */
#endif
       ST( assert(word[e]==cw+1); word[e]=cw );                                                          /* P5: back to RUNNING, an error */
       if :: atomic { t<head+C -> t=0 } DIE(skip) fi; goto claimed
    od;
end_stopped: false;
done: skip
}
#undef s

/* ------------------------------------------------------------------------------------------------------------------- taker */
#define TCLEAR h=0; n=0; g=0; i=0; s=NONE; w=0; j=0; do :: j<SLOTS -> my[j]=0; j++ :: else -> break od; j=0
#if TDEATHS>0
#define TDIE :: atomic { tdeaths<TDEATHS -> tdeaths++; TCLEAR; asleep=0; goto attach }
#else
#define TDIE
#endif
#define TS(x) if :: atomic { x } TDIE fi

/* my[]: what this handle has */
#define HOLD     1                              /* taken, not delivered */
#define LEASED   2                              /* delivered, not released */
#define BACKLOG  3                              /* adopted, not handed out again */
inline lowest(v) {
    s=NONE; i=0;
    do :: i<SLOTS -> if :: my[i]==v && (s==NONE || dpos[i]<dpos[s]) -> s=i :: else fi; i++ :: else -> break od; i=0
}
inline first(v) {
    s=NONE; i=0;
    do :: i<SLOTS -> if :: my[i]==v && s==NONE -> s=i :: else fi; i++ :: else -> break od; i=0
}
inline count(v) {
    g=0; i=0;
    do :: i<SLOTS -> if :: my[i]==v -> g++ :: else fi; i++ :: else -> break od; i=0
}
/* the held group whose turn it is: all tickets below it were delivered, or ended and swept (the ledger's watermark) */
inline turn() {
    j=1; do :: j<=NT && (IN(gdel,j) || IN(gend,j)) -> j++ :: else -> break od;
    s=NONE; i=0;
    do :: i<SLOTS -> if :: my[i]==HOLD && payload[i]==j -> s=i :: else fi; i++ :: else -> break od; i=0; j=0
}
inline check_final() {
    assert(head==npub);
    i=0; do :: i<SLOTS -> assert(gtk[i]==0); i++ :: else -> break od;                         /* all memory is back */
    i=0; do :: i<E -> assert(nstuck>0 || STATE(word[i])==FREE || STATE(word[i])>=DONE); i++ :: else -> break od; i=0
}
#ifdef M_NO_EPOCH
#define OWNS(i,x) ((dw[i]&3)==DTAKEN)
#else
#define OWNS(i,x) (dw[i]==TAKENBY(x))
#endif
#ifdef IDLE
#define RING TS( if :: idle!=0 -> abell=1 :: else fi )                                                   /* D3 */
#else
#define RING skip
#endif
/* D2: release. The group's views were read until here: its payload must be untouched. */
#define RELEASE(x) :: atomic { my[x]==LEASED -> assert(payload[x]==gtk[x] && gtk[x]!=0 && OWNS(x,epoch)); \
                               dw[x]=DRELEASED; gtk[x]=0; my[x]=0; FORGET(x) }; RING
#if SLOTS==1
#define ANYLEASE my[0]==LEASED
#define RELEASES RELEASE(0)
#elif SLOTS==2
#define ANYLEASE (my[0]==LEASED||my[1]==LEASED)
#define RELEASES RELEASE(0) RELEASE(1)
#elif SLOTS==3
#define ANYLEASE (my[0]==LEASED||my[1]==LEASED||my[2]==LEASED)
#define RELEASES RELEASE(0) RELEASE(1) RELEASE(2)
#else
#define ANYLEASE (my[0]==LEASED||my[1]==LEASED||my[2]==LEASED||my[3]==LEASED)
#define RELEASES RELEASE(0) RELEASE(1) RELEASE(2) RELEASE(3)
#endif

proctype Taker() {
    byte my[SLOTS]; byte h, n, g, i, j, s=NONE; short w;

attach:
#if TDEATHS>0 || CLOSES>0
    atomic {                                                                                             /* A1: owner, epoch */
#if CLOSES>0
        epoch++;
#ifndef OTHERPROC
        adopting=1;                             /* the GIL: no lease of this process dies meanwhile */
#endif
#endif
        skip };
    TS( wake_at=NEVER );                                                                                 /* A2 */
#ifndef M_ADOPT_NO_HEAD
    TS( w=cell[head%C]; if :: CTAG(w)!=TAG(head) -> w=0; goto adopt :: else fi; s=CWORKER(w)*D+CDESC(w); w=0 );      /* A3 */
    TS( if :: !((dw[s]&3)==DTAKEN && dpos[s]==head) -> s=NONE; goto adopt :: else fi; s=NONE );          /* A4 */
    TS( if :: tail==head -> tail=head+1 :: else fi );                                                    /* A5 */
    TS( head++ );                                                                                        /* A6 */
#endif
adopt:
    do :: atomic { j<SLOTS -> if :: (dw[j]&3)!=DTAKEN -> j++; goto adopt :: else fi };                   /* A7 */
#ifndef M_ADOPT_STORE
          TS( if :: (dw[j]&3)==DTAKEN -> dw[j]=TAKENBY(epoch); my[j]=BACKLOG :: else fi; j++ )           /* A8, as a CAS */
#else
          TS( dw[j]=TAKENBY(epoch); my[j]=BACKLOG; j++ )                                                 /* A8, as a plain store */
#endif
       :: atomic { j==SLOTS -> j=0; break }
       TDIE od;
#if CLOSES>0
    adopting=0;
#endif
#endif

loop:
    do
    :: atomic { ALLDONE && !ANYLEASE -> first(BACKLOG); if :: s==NONE -> check_final(); goto done :: else -> goto take fi }
    RELEASES
    TDIE
#if CLOSES>0
    :: atomic { closes<CLOSES -> closes++;
                do :: j<SLOTS -> if :: my[j]==LEASED -> old[j]=epoch :: else fi; j++ :: else -> break od; j=0;
                TCLEAR; goto attach }
#endif
    :: atomic { !ALLDONE -> n=1 };
#if NMAX>1
       if :: atomic { skip } :: atomic { ndel+nend+nstuck+2<=NT -> n=2 } fi;
#endif
get:
#ifndef M_SEEN_LATE
       TS( news=0 );                                                                                     /* W1: seen, before looking */
#endif
take:
       TS(
#ifndef TICKETS
           count(HOLD); if :: n>0 && g>=n -> goto look :: else fi;
#endif
#ifdef M_ADOPT_NO_POSITION
           first(BACKLOG);
#else
           lowest(BACKLOG);
#endif
           if :: s!=NONE -> if :: word[dentry[s]]==dtw[s] -> my[s]=HOLD :: else -> my[s]=LEASED fi;      /* T1: the backlog */
                            g=0; s=NONE; if :: n==0 -> goto loop :: else -> goto take fi
              :: else fi;
#ifndef TICKETS
           if :: g+tail-head+(FILLED(tail)->1:0)<n -> g=0; goto look :: else fi; g=0;                     /* pending(): not before n are there */
#endif
           w=cell[head%C];                                                                               /* T2: filled? */
           if :: CTAG(w)!=TAG(head) -> w=0; goto look :: else -> s=CWORKER(w)*D+CDESC(w); w=0 fi );
       TS( if :: tail==head -> tail=head+1 :: else fi );                                                 /* T3 */
#ifdef M_TAKEN_AFTER_HEAD
       TS( dpos[s]=head ); TS( head++ );
       TS( assert(gtk[s]!=0 && payload[s]==gtk[s] && gpos[s]==head-1); dw[s]=TAKENBY(epoch); my[s]=HOLD; s=NONE );
#elif defined(M_POSITION_AFTER_TAKEN)
       TS( assert(gtk[s]!=0 && payload[s]==gtk[s] && gpos[s]==head); dw[s]=TAKENBY(epoch) );
       TS( dpos[s]=head );
       TS( head++; my[s]=HOLD; s=NONE );
#else
       TS( dpos[s]=head );                                                                               /* T4: position */
       TS( assert(gtk[s]!=0 && payload[s]==gtk[s] && gpos[s]==head); dw[s]=TAKENBY(epoch) );             /* T5: TAKEN */
       TS( head++; my[s]=HOLD; s=NONE );                                                                 /* T6: head */
#endif
       goto take;
look:
       atomic {
#ifdef TICKETS
           turn(); if :: s!=NONE -> goto deliver :: else fi;
           if :: ALLDONE -> n=0; goto loop :: else fi
#else
           count(HOLD); if :: g>=n -> g=0; lowest(HOLD); goto deliver :: else fi;
           if :: ndel+nend+nstuck+n>NT -> g=0; n--; if :: n==0 -> goto loop :: else -> goto take fi :: else fi   /* not meetable */
#endif
#if !defined(M_SEEN_LATE) && !defined(M_TARGET_FROM_PENDING)
#ifdef TICKETS
           ; h=head+1
#else
           ; h=head+n-g; g=0                                                                             /* W2: target */
#endif
#endif
       };
#ifdef M_SEEN_LATE
       TS( news=0; h=head+n-g; g=0 );
#endif
#ifdef M_TARGET_FROM_PENDING
       TS( h=tail ); TS( h=h+(FILLED(h)->1:0)+1 );
#endif
       /* ---- wait */
#ifdef SLEEP
       TS( wake_at=h );                                                                                  /* S1: arm */
#ifndef M_NO_LOOK
       TS( if :: FILLED(h-1) -> goto disarm :: else fi );                                                /* S2: look */
       TS( if :: tail>=h -> goto disarm :: else fi );                                                    /* S3 */
#endif
       TS( if :: news -> goto disarm :: else fi );                                                       /* S4 */
       TS( asleep=!news );                                                                               /* S5: FUTEX_WAIT(seen) */
       do :: atomic { !asleep -> break }        /* no slice ends: no progress may depend on it */
          RELEASES                              /* another thread of the trainer */
          TDIE
       od;
disarm:
       TS( wake_at=NEVER; h=0 );                                                                         /* S6 */
#else
       do :: atomic { FILLED(h-1) || news || (nstuck>0 && ndel+nend+nstuck+n>NT) -> h=0; break } RELEASES TDIE od;
#endif
       goto get;
deliver:
#ifdef M_RELEASE_BEFORE_DONE
       TS( dw[s]=DRELEASED; my[s]=0; h=gtk[s]; gtk[s]=0; g=dentry[s]; w=dtw[s] );
       TS( assert(word[g]==w); word[g]=w+1; w=0; g=0; PUT(gdel,h); h=0; ndel++; s=NONE; n=0 ); goto loop;
#endif
       TS( assert(word[dentry[s]]==dtw[s]); word[dentry[s]]=dtw[s]+1;                                    /* D1: PUBLISHING -> DONE */
           assert(payload[s]==gtk[s] && gtk[s]!=0 && !IN(gdel,gtk[s]));                                  /* the right bytes, once */
#ifndef TICKETS
           assert(gpos[s]==ndel);                                                                        /* FIFO, over all takers */
#endif
           PUT(gdel,gtk[s]); ndel++; my[s]=LEASED; n--;
#if !defined(ADMITTER) && !defined(SWEEPER)
           if :: nexttk<NT -> g=dentry[s]; ADMIT(g); g=0 :: else fi;
#endif
           s=NONE;
           if :: n==0 -> goto loop :: else fi;
#ifdef TICKETS
           goto take
#else
           lowest(HOLD); goto deliver
#endif
         )
    od;
done: skip
}

#if CLOSES>0
proctype OldLease() {                           /* destructors of delivered leases whose Consumer was closed */
    byte i;
    do :: atomic { ALLDONE -> break }
       :: atomic { old[i]!=0 && !adopting ->
                   if :: OWNS(i,old[i]) -> dw[i]=DRELEASED; gtk[i]=0; FORGET(i) :: else fi; old[i]=0 }     /* D2 */
       :: atomic { i=(i+1)%SLOTS }
    od
}
#endif

/* ------------------------------------------------------------------------------------------------------------------- admitter */
#ifdef IDLE
#define BELLS atomic { if :: idle&1 -> rung[0]=1 :: else fi; if :: idle&2 -> rung[P-1]=1 :: else fi }     /* B4: idle, bells */
#endif
#define AS(x) atomic { x }
#define SWEEPS(e) (STATE(word[e])>=DONE || (nexttk<NT && STATE(word[e])==FREE))
proctype Admitter() {
    byte e; bit ok;
    do
    :: atomic { ALLDONE -> goto done }
#ifndef SWEEPER
    :: atomic { nexttk<NT && SWEEPS(0) -> ADMIT(0) }
#if E>1
    :: atomic { nexttk<NT && SWEEPS(1) -> ADMIT(1) }
#endif
#if E>2
    :: atomic { nexttk<NT && SWEEPS(2) -> ADMIT(2) }
#endif
#else
#ifdef IDLE
    :: abell -> abell=0; BELLS
#endif
    :: if :: atomic { SWEEPS(0) -> e=0 }
#if E>1
          :: atomic { SWEEPS(1) -> e=1 }
#endif
       fi;
       if :: atomic { STATE(word[e])>=DONE ->
                      ok=(STATE(word[e])!=DONE); if :: ok -> PUT(gend,rec[e]); nend++ :: else fi; word[e]=word[e]&~511 };   /* B1 */
             if :: ok -> WAKE_TAKER(AS) :: else fi
          :: atomic { else -> skip }
       fi;
       if :: nexttk<NT -> atomic { nexttk++; rec[e]=nexttk };                                            /* B2: record */
                          word[e]=NEXTGEN(word[e])|READY;                                                /* B3: READY */
#ifdef IDLE
                          BELLS
#endif
          :: else fi;
       e=0
#endif
    od;
done: skip
}

init { atomic {
    byte q=0;
#ifndef SWEEPER
    do :: q<E && nexttk<NT -> ADMIT(q); q++ :: else -> q=0; break od;
#endif
    do :: q<P -> run Worker(q); q++ :: else -> q=0; break od;
    run Taker();
#if defined(ADMITTER) || defined(SWEEPER)
    run Admitter();
#endif
#if CLOSES>0
    run OldLease();
#endif
} }
