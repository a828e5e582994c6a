/* cuda_fp16.h - __half and __nv_bfloat16 on the CPU (cuda_runtime.h): conversions and arithmetic round to nearest, ties to even.
 *
 * Sums, products and quotients are formed in f32 and rounded once more: with 24 bits that cannot change the result of 11 or
 * 8 bits. A multiply-add is rounded once, from a double whose last bit says whether it is exact. */
#ifndef CUDA_FP16_H
#define CUDA_FP16_H
#include "cuda_runtime.h"

struct CudaHalf {
    static float wide(uint16_t h) {
        const float f = cuda_bits<float>((uint32_t)(h & 0x7fff) << 13) * 0x1p112f;
        return cuda_bits<float>((cuda_bits<uint32_t>(f) | (f >= 65536 ? 0x7f800000u : 0)) | (uint32_t)(h & 0x8000) << 16);
    }
    static uint16_t narrow(float f) {
        const uint32_t u = cuda_bits<uint32_t>(f), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
        if (a > 0x7f800000) return 0x7fff;
        if (a >= 0x477ff000) return (uint16_t)(sign | 0x7c00);                         // 65520 and above
        if (a < 0x38800000)                                                            // below 2^-14: steps of 2^-24
            return (uint16_t)(sign | (cuda_bits<uint32_t>(cuda_bits<float>(a) + 0.5f) - 0x3f000000));
        return (uint16_t)(sign | ((a + 0xfff + (a >> 13 & 1) - 0x38000000) >> 13));
    }
};
struct CudaBfloat {
    static float wide(uint16_t h) { return cuda_bits<float>((uint32_t)h << 16); }
    static uint16_t narrow(float f) {
        const uint32_t u = cuda_bits<uint32_t>(f);
        return f != f ? 0x7fff : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
    }
};

template <typename F> struct CudaSmall {
    uint16_t bits;
    CudaSmall() = default;
    CudaSmall(float f) : bits(F::narrow(f)) { }
    CudaSmall(double f) : bits(F::narrow(odd_float(f))) { }
    CudaSmall(int v) : CudaSmall((double)v) { }
    CudaSmall(unsigned v) : CudaSmall((double)v) { }
    operator float() const { return F::wide(bits); }
    CudaSmall &operator+=(CudaSmall b) { return *this = CudaSmall((float)*this + (float)b); }
    CudaSmall &operator-=(CudaSmall b) { return *this = CudaSmall((float)*this - (float)b); }
    CudaSmall &operator*=(CudaSmall b) { return *this = CudaSmall((float)*this * (float)b); }
    CudaSmall &operator/=(CudaSmall b) { return *this = CudaSmall((float)*this / (float)b); }
    static float odd_float(double d) {                 // to one of the floats beside d; where d is none of them, the odd one
        const float f = (float)d;
        if (f == d || f != f || cuda_bits<uint32_t>(f) & 1) return f;
        return cuda_bits<float>(cuda_bits<uint32_t>(f) + (fabs((double)f) < fabs(d) ? 1 : -1));
    }
    static CudaSmall fma(CudaSmall a, CudaSmall b, CudaSmall c) {
        const double p = (double)(float)a * (float)b, d = (float)c, s = p + d, back = s - p, lost = (p - (s - back)) + (d - back);
        if (lost == 0 || lost != lost || cuda_bits<uint64_t>(s) & 1) return CudaSmall(s);
        return CudaSmall(cuda_bits<double>(cuda_bits<uint64_t>(s) + ((lost > 0) == (s > 0) ? 1 : -1)));
    }
};
template <typename F> struct __align__(4) CudaSmall2 { CudaSmall<F> x, y; };
typedef CudaSmall<CudaHalf> __half;
typedef CudaSmall2<CudaHalf> __half2;
typedef CudaSmall<CudaBfloat> __nv_bfloat16;
typedef CudaSmall2<CudaBfloat> __nv_bfloat162;
typedef __half half;
typedef __half2 half2;
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

#define CUDA_SMALL(name, expression) \
    template <typename F> static inline CudaSmall<F> name(CudaSmall<F> a, CudaSmall<F> b) { \
        const float x = a, y = b; \
        return CudaSmall<F>(expression); \
    } \
    template <typename F> static inline CudaSmall2<F> name##2(CudaSmall2<F> a, CudaSmall2<F> b) { \
        return { name(a.x, b.x), name(a.y, b.y) }; \
    }
CUDA_SMALL(__hadd, x + y)
CUDA_SMALL(__hsub, x - y)
CUDA_SMALL(__hmul, x * y)
CUDA_SMALL(__hdiv, x / y)
CUDA_SMALL(__hmin, fminf(x, y))
CUDA_SMALL(__hmax, fmaxf(x, y))
#undef CUDA_SMALL
template <typename F> static inline CudaSmall<F> operator+(CudaSmall<F> a, CudaSmall<F> b) { return __hadd(a, b); }
template <typename F> static inline CudaSmall<F> operator-(CudaSmall<F> a, CudaSmall<F> b) { return __hsub(a, b); }
template <typename F> static inline CudaSmall<F> operator*(CudaSmall<F> a, CudaSmall<F> b) { return __hmul(a, b); }
template <typename F> static inline CudaSmall<F> operator/(CudaSmall<F> a, CudaSmall<F> b) { return __hdiv(a, b); }
template <typename F> static inline CudaSmall2<F> operator+(CudaSmall2<F> a, CudaSmall2<F> b) { return __hadd2(a, b); }
template <typename F> static inline CudaSmall2<F> operator-(CudaSmall2<F> a, CudaSmall2<F> b) { return __hsub2(a, b); }
template <typename F> static inline CudaSmall2<F> operator*(CudaSmall2<F> a, CudaSmall2<F> b) { return __hmul2(a, b); }
template <typename F> static inline CudaSmall<F> __hneg(CudaSmall<F> a) { a.bits ^= 0x8000; return a; }
template <typename F> static inline CudaSmall<F> __habs(CudaSmall<F> a) { a.bits &= 0x7fff; return a; }
template <typename F> static inline CudaSmall2<F> __hneg2(CudaSmall2<F> a) { return { __hneg(a.x), __hneg(a.y) }; }
template <typename F> static inline CudaSmall2<F> __habs2(CudaSmall2<F> a) { return { __habs(a.x), __habs(a.y) }; }
template <typename F> static inline bool __hisnan(CudaSmall<F> a) { return (float)a != (float)a; }
template <typename F> static inline CudaSmall<F> __hfma(CudaSmall<F> a, CudaSmall<F> b, CudaSmall<F> c) {
    return CudaSmall<F>::fma(a, b, c);
}
template <typename F> static inline CudaSmall2<F> __hfma2(CudaSmall2<F> a, CudaSmall2<F> b, CudaSmall2<F> c) {
    return { __hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y) };
}
template <typename F> static inline float __low2float(CudaSmall2<F> a) { return a.x; }
template <typename F> static inline float __high2float(CudaSmall2<F> a) { return a.y; }
#define CUDA_SMALL_NAMES(small, type, wide2, narrow2, to) \
    static inline float __##small##2float(type a) { return a; } \
    static inline type __float2##small(float a) { return type(a); } \
    static inline type __float2##small##_rn(float a) { return type(a); } \
    static inline type __double2##small(double a) { return type(a); } \
    static inline type __int2##small##_rn(int a) { return type(a); } \
    static inline float2 wide2(type##to a) { return { a.x, a.y }; } \
    static inline type##to narrow2(float2 a) { return { type(a.x), type(a.y) }; } \
    static inline type##to __floats2##small##2_rn(float a, float b) { return { type(a), type(b) }; } \
    static inline type##to __float2##small##2_rn(float a) { return { type(a), type(a) }; } \
    static inline type##to __##small##2##small##2(type a) { return { a, a }; } \
    static inline type __low2##small(type##to a) { return a.x; } \
    static inline type __high2##small(type##to a) { return a.y; } \
    static inline type##to __lows2##small##2(type##to a, type##to b) { return { a.x, b.x }; } \
    static inline type##to __highs2##small##2(type##to a, type##to b) { return { a.y, b.y }; } \
    static inline unsigned short __##small##_as_ushort(type a) { return a.bits; } \
    static inline type __ushort_as_##small(unsigned short a) { type t; t.bits = a; return t; }
CUDA_SMALL_NAMES(half, __half, __half22float2, __float22half2_rn, 2)
CUDA_SMALL_NAMES(bfloat16, __nv_bfloat16, __bfloat1622float2, __float22bfloat162_rn, 2)
#undef CUDA_SMALL_NAMES
static inline __half2 __halves2half2(__half a, __half b) { return { a, b }; }
static inline __half2 __low2half2(__half2 a) { return { a.x, a.x }; }
static inline __half2 __high2half2(__half2 a) { return { a.y, a.y }; }
static inline __half2 make_half2(__half a, __half b) { return { a, b }; }
static inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return { a, b }; }
static inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return { a, b }; }
#endif
