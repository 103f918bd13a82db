/* A model of the hints of table.h for spin: `front`, `admitted` and the admissions, and the bits of ended entries. They may be
 * wrong in every way but one: no READY ticket is hidden from a worker that sleeps, no ended one from the sweep. Sequentially
 * consistent; the safety look of 50 ms is left out, so what is lost stays lost, and spin finds a deadlock. Deaths are not in it:
 * they end with a shake (recover, the next taker, the next admitter), after which all look at all.
 *
 *     Admitter    sweeps by the bits, admits in the order of tickets (or out of it: LATE), wakes whoever is idle
 *     Worker(p)   finds by the window or, after shakes, by a look at all; gives back or ends what it claimed; sleeps idle
 *
 * Bounds (-D):    W workers, E entries (and places in the window), NT tickets, GIVES
 * Variants:       BITS (the sweep goes by the bits; else it sees all that ended), LATE (admissions out of order)
 * Mutations:      M_..., each with the property that it breaks in check.py
 */
#ifndef W
#define W 2
#endif
#ifndef E
#define E 2
#endif
#ifndef NT
#define NT 3
#endif
#ifndef GIVES
#define GIVES 1
#endif
#define NONE 255

/* An entry's word: {state:2, generation}. The claim names the exact word. */
#define FREE 0
#define READY 1
#define RUNNING 2
#define ENDED 3
#define STATE(w) ((w)&3)
#define WITH(w,s) (((w)&~3)|(s))

byte word[E], window[E];          /* an admission: {generation, entry} as entry * 64 + generation */
byte admitted, position, shakes;  /* front is {shakes, position}: read and changed in one step */
bit bits[E], summary;             /* a word of bits for each entry, so that the two levels can be seen apart */
bit idle[W], rung[W];
byte gives, swept, claimed;

#define ADMISSION(e)  ((e)*64+(word[e]>>2))
#define RING          atomic { k=0; do :: k<W -> if :: idle[k] -> rung[k]=1 :: else fi; k++ :: else -> break od; k=0 }

inline pass()                                       /* at, saw: front as it was read */
{
    atomic { if :: position==at && shakes==saw -> position++ :: else fi }
}

inline look_at_front()                              /* front_ready(): `e` is READY, or NONE, or `passed` */
{
    atomic { at=position; saw=shakes; passed=0; e=NONE };
    if
    :: atomic { at<admitted -> a=window[at%E]; e=a/64 };      /* a cell of the window changes behind front only */
       atomic { w=word[e];
                if :: STATE(w)==READY && (w>>2)==a%64 :: else -> e=NONE; passed=1 fi };
       if :: passed -> pass() :: else fi
    :: atomic { at>=admitted -> skip }
    fi
}

inline look_at_all()
{
    atomic { at=position; saw=shakes; e=NONE; all=1; k=0 }
    do
    :: k<E -> atomic { if :: STATE(word[k])==READY -> found[k]=word[k]; if :: e==NONE -> e=k; w=word[k] :: else fi
                          :: else -> found[k]=0 fi; k++ }
    :: else -> break
    od;
    atomic {
        k=0;
        do
        :: k<E ->
           if
           :: found[k]!=0 ->
              a=at; in=0;
              do :: a<admitted && a<at+E -> if :: window[a%E]==k*64+(found[k]>>2) -> in=1 :: else fi; a++ :: else -> break od;
              all=all&&in
           :: else
           fi;
           k++
        :: else -> break
        od;
#ifdef M_SEEN_ALWAYS
        all=1;
#endif
        if :: all -> seen=saw :: else -> seen=NONE fi;
        k=0; a=0; in=0; all=0; do :: k<E -> found[k]=0; k++ :: else -> break od; k=0
    }
}

inline find()
{
    do
    :: look_at_front();
       if
       :: saw!=seen -> look_at_all(); break
       :: else -> if :: e!=NONE || !passed -> break :: else fi
       fi
    od;
    atomic { at=0; saw=0; a=0; passed=0 }           /* dead: fewer states */
}

inline note(x)                                      /* note_ended(): the bit, then the summary unless it stands */
{
#ifdef BITS
#ifdef M_SUMMARY_FIRST
    if :: summary==0 -> summary=1 :: else fi;
    bits[x]=1;
#else
    bits[x]=1;
    if :: summary==0 -> summary=1 :: else fi;
#endif
#endif
    endings=1
}

inline collect(x)
{
    if :: STATE(word[x])==ENDED -> word[x]=WITH(word[x],FREE); swept++ :: else fi
}

bit endings;                                        /* the worker rings the admitter's bell */

proctype Worker(byte p)
{
    byte e, w, at, saw, a, k, seen;
    byte found[E];
    bit passed, all, in;
work:
    find();
    if
    :: e==NONE ->
       idle[p]=1;
       find();                                      /* say it, then look */
       if
       :: e==NONE ->
end:      if :: rung[p] -> rung[p]=0 :: atomic { claimed==NT -> goto done } fi;
          idle[p]=0; e=0; goto work
       :: else -> idle[p]=0
       fi
    :: else
    fi;
    if
    :: atomic { word[e]==w -> word[e]=WITH(w,RUNNING) }
    :: atomic { word[e]!=w -> e=0; w=0; goto work }
    fi;
    if
    :: atomic { gives<GIVES -> gives++; word[e]=WITH(w,READY) };
#ifndef M_NO_SHAKE
       shakes=(shakes+1)%4;
#endif
       /* it works on; whoever is idle is rung by the keeper */
       RING;
       e=0; w=0;
       goto work
    :: atomic { claimed++; word[e]=WITH(w,ENDED) };
       note(e);
       e=0; w=0;
       goto work
    fi;
done:
    skip
}

proctype Admitter()
{
    byte t, e, k, at, saw, a, w;
    bit passed, late;
    do
    :: atomic { swept==NT -> break }
    :: atomic { swept<NT -> endings=0 };
       /* sweep: the summary, then the bits */
#ifdef BITS
       if
       :: atomic { summary ->
#ifndef M_BITS_FIRST
          summary=0
#endif
          };
          do :: atomic { k<E -> passed=bits[k]; bits[k]=0; if :: passed -> collect(k) :: else fi; passed=0; k++ } :: atomic { k==E -> k=0; break } od;
#ifdef M_BITS_FIRST
          summary=0
#endif
       :: atomic { !summary -> skip }
       fi;
#else
       atomic { do :: k<E -> collect(k); k++ :: else -> break od; k=0 };
#endif
       /* admit what fits */
       do
       :: atomic { t<NT -> e=0; do :: e<E && STATE(word[e])!=FREE -> e++ :: else -> break od; if :: e==E -> e=0; break :: else fi };
          do                                        /* room in the window */
          :: atomic { at=position; saw=shakes; if :: admitted-at<E -> break :: else fi };
             atomic { a=window[at%E]; w=word[a/64]; passed=!(STATE(w)==READY && (w>>2)==a%64) };
             assert(passed);                        /* so many cannot all be READY: this entry is FREE */
             pass()
          od;
          atomic { at=0; saw=0; a=0; w=0; passed=0 };
          word[e]=((word[e]>>2)+1)*4+READY;
#ifdef LATE
          if :: late=1 :: late=0 fi;
#endif
          if
          :: late -> shakes=(shakes+1)%4
          :: else ->
#ifdef M_ADMITTED_FIRST
             admitted++; window[(admitted-1)%E]=ADMISSION(e)
#else
             window[admitted%E]=ADMISSION(e); admitted++
#endif
          fi;
          atomic { t++; late=0; e=0 }
       :: atomic { t==NT -> break }
       od;
       RING;
       if :: endings :: atomic { swept==NT -> break } fi   /* its bell */
    od
}

init
{
    byte i;
    atomic { do :: i<W -> run Worker(i); i++ :: else -> break od; run Admitter() }
}
