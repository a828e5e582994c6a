/* cuda_bf16.h - see cuda_fp16.h, which has both 16-bit types. */
#include "cuda_fp16.h"
