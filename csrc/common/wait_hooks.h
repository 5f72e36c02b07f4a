// What a caller of the transport does while it waits for other ranks; called only once a wait outlasts the spinning.
#pragma once

typedef struct {
  void (*enter)(void*);              // before the first sleep (release the interpreter's lock)
  int (*tick)(void*);                // about every 50 ms; nonzero ends the wait with GT_INTERRUPTED
  void (*leave)(void*);
  void* context;
} gt_hooks;
