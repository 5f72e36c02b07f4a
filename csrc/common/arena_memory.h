// The arena: memory of this process that its peers on the host can read and write. transport/arena.cpp implements it.
#pragma once
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

void* gt_alloc(size_t bytes);        // 64-byte aligned, pooled; NULL where there is none left
void gt_free(void* data);            // NULL is fine
int gt_in_arena(const void* data);

#ifdef __cplusplus
}
#endif
