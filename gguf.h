/* gguf.h - reads GGUF model files and defines the values of their block formats. Single header.
 *
 *   #define _GNU_SOURCE            // before every include: open, pread, mmap
 *   #define GGUF_IMPLEMENTATION    // in exactly one C file
 *   #include "gguf.h"
 *
 * The file is untrusted. Nothing here exits, prints or keeps globals: a function that can fail returns < 0 and puts one
 * line into g->err, "<what>: expected <x>, got <y> (E_CODE at byte N)", with unprintable bytes escaped. The caller
 * prefixes the file name. After a successful open, all tables, strings and tensors are known to lie inside the file.
 * A tensor may have any type of the format, so that an unused tensor of a rare type does not make a file unreadable.
 * The caller checks the tensors that it uses with gguf_type_supported.
 *
 * FILE      all integers little-endian, everything packed: fields are read with memcpy, never through a cast pointer
 *   offset  size  field
 *        0     4  magic 47 47 55 46 "GGUF"
 *        4     4  version u32: 2 or 3 (the same bytes in a little-endian file)
 *        8     8  n_tensors u64
 *       16     8  n_kvs u64
 *       24     -  n_kvs entries       key string, type i32, value
 *        -     -  n_tensors infos     name string, n_dims u32, dims u64 * n_dims (fastest first), type i32, offset u64
 *        -     -  padding to the next multiple of general.alignment (32 if the key is absent); none if n_tensors = 0
 *        -     -  data_start: tensor i is at data_start + offset_i, each tensor padded to the alignment
 *   string  n u64, then n bytes, no terminator; a string value may hold any bytes, also NUL and broken UTF-8
 *   array   element type i32, count u64, then the elements packed; arrays of arrays are refused
 *   offset_i must be the running sum of the padded sizes before it: no overlap, no gap, one comparison
 *
 * SPLIT     a model in parts: PREFIX-00001-of-00003.gguf etc., each a complete file with its own alignment and
 *           data_start
 *   split.count          u16  parts, at most 256; 1 or absent: not split
 *   split.no             u16  this part, from 0
 *   split.tensors.count  any integer, in the first part: tensors of all parts together
 *   The first part holds all other keys; it may have no tensors. gguf_open of the first part opens all parts and puts
 *   their tensors into one table. An error in a later part starts with that part's name; its byte position is in that
 *   part.
 *
 * BLOCKS    the types that this file can decode; a row is ne[0] elements, and a block never crosses the end of a row
 *   type    elems  bytes  fields at byte offsets                            value of element i
 *   F32         1      4  f32                                               itself
 *   F16, BF16   1      2  binary16; upper half of a binary32                itself
 *   Q8_0       32     34  d f16 @0, q i8[32] @2                             d*q[i]
 *   Q4_0       32     18  d f16 @0, q u8[16] @2                             d*(c-8)   c: low nibbles 0..15, high 16..31
 *   Q4_1       32     20  d f16 @0, m f16 @2, q u8[16] @4                   d*c + m   c as Q4_0
 *   Q5_0       32     22  d f16 @0, h u32 @2, q u8[16] @6                   d*(c-16)  c: as Q4_0, + 16*(bit i of h)
 *   Q5_1       32     24  d f16 @0, m f16 @2, h u32 @4, q u8[16] @8         d*c + m   c as Q5_0
 *   IQ4_NL     32     18  d f16 @0, q u8[16] @2                             d*T[c]    c as Q4_0
 *   MXFP4      32     17  e u8 @0, q u8[16] @1                              2^(e-128)*V[c]  c as Q4_0; e = 255: NaN
 *   NVFP4      64     36  s u8[4] @0, q u8[32] @4                           (s/2)*V[c]  per sub-block of 16; s: E4M3
 *                         c: of each 8 bytes of q, the low nibbles are elements 0..7, the high ones 8..15
 *   Q2_K      256     84  s u8[16] @0, q u8[64] @16, d f16 @80, dmin f16 @82  (d*sc)*c - (dmin*mn) per sub-block
 *                                                                           of 16; sc: low nibble of s, mn: high
 *   Q3_K      256    110  h u8[32] @0, q u8[64] @32, s u8[12] @96, d f16 @108  d*sc*(c-4)  per sub-block of 16
 *   Q4_K      256    144  d f16 @0, dmin f16 @2, s u8[12] @4, q u8[128] @16 (d*sc)*c - (dmin*mn)  per sub-block of 32
 *   Q5_K      256    176  d, dmin, s as Q4_K, h u8[32] @16, q u8[128] @48   as Q4_K
 *   Q6_K      256    210  ql u8[128] @0, qh u8[64] @128, sc i8[16] @192, d f16 @208   d*sc*(c-32) per sub-block of 16
 *   IQ4_XS    256    136  d f16 @0, sh u16 @2, sl u8[4] @4, q u8[128] @8    d*sc*T[c] per sub-block of 32, as IQ4_NL
 *   T = -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113
 *   V = 0 1 2 3 4 6 8 12, and for c >= 8 their negatives: twice the values of E2M1, so that codes are integers
 *   E4M3: (1 + M/8)*2^(E-7) with 4 bits E above 3 bits M, or M*2^-9 if E = 0; bit 7 is ignored and 0x7f is 0. An NVFP4
 *   tensor has one more factor, stored in a separate tensor.
 *   How the K types and IQ4_XS pack sc, mn (6 bits) and codes: gguf__q?_k_scales, gguf__q?_k_codes, gguf__unpack below.
 *   Every product here has at most 24 significant bits, so it is exact in f32: a dequantised value is the correctly
 *   rounded value of its formula, with or without fused multiply-add, on any device that does not flush subnormals.
 */
#ifndef GGUF_H
#define GGUF_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __F16C__
#include <immintrin.h>
#endif
#ifdef __cplusplus
extern "C" {
#endif

// ---- the contents of a file --------------------------------------------------------------------------------------

enum {                          // value types, ids of the file
    GGUF_V_U8, GGUF_V_I8, GGUF_V_U16, GGUF_V_I16, GGUF_V_U32, GGUF_V_I32, GGUF_V_F32, GGUF_V_BOOL, GGUF_V_STR,
    GGUF_V_ARRAY, GGUF_V_U64, GGUF_V_I64, GGUF_V_F64
};

enum {                          // tensor types, ids of the file; the gaps are removed types
    GGUF_F32 = 0, GGUF_F16 = 1, GGUF_Q4_0 = 2, GGUF_Q4_1 = 3, GGUF_Q5_0 = 6, GGUF_Q5_1 = 7, GGUF_Q8_0 = 8,
    GGUF_Q8_1 = 9,
    GGUF_Q2_K = 10, GGUF_Q3_K = 11, GGUF_Q4_K = 12, GGUF_Q5_K = 13, GGUF_Q6_K = 14, GGUF_Q8_K = 15, GGUF_IQ2_XXS = 16,
    GGUF_IQ2_XS = 17, GGUF_IQ3_XXS = 18, GGUF_IQ1_S = 19, GGUF_IQ4_NL = 20, GGUF_IQ3_S = 21, GGUF_IQ2_S = 22,
    GGUF_IQ4_XS = 23, GGUF_I8 = 24, GGUF_I16 = 25, GGUF_I32 = 26, GGUF_I64 = 27, GGUF_F64 = 28, GGUF_IQ1_M = 29,
    GGUF_BF16 = 30, GGUF_TQ1_0 = 34, GGUF_TQ2_0 = 35, GGUF_MXFP4 = 39, GGUF_NVFP4 = 40, GGUF_Q1_0 = 41, GGUF_Q2_0 = 42,
    GGUF_N_TYPES = 43           // first unknown id
};

typedef struct {
    const char *s;              // n bytes, no terminator
    size_t n;
} GgufStr;

typedef struct {
    GgufStr key;                // 1..65535 bytes of printable ASCII, unique in the file
    int type, elem_type;        // GGUF_V_*; elem_type == type unless type is GGUF_V_ARRAY
    uint64_t count;             // scalar: 1; string: bytes; array: elements
    const uint8_t *data;        // scalar, string, array of fixed-size elements: the bytes, unaligned
    GgufStr *strs;              // array of strings: (count); else NULL
    bool read;                  // gguf_find_kv has returned it, so somebody knows the key
} GgufKv;

typedef struct {
    GgufStr name;               // 1..63 bytes of printable ASCII (safetensors: 1..255), unique in the model
    int type, n_dims;           // type: any known id, even one that gguf_type_supported does not accept
    uint64_t ne[4];             // elements per dimension, fastest first: {cols, rows, experts, 1}; 1 beyond n_dims
    uint64_t offset, size;      // bytes; offset from the start of the data section of its file
    const uint8_t *data;        // (size) bytes; in a GGUF file aligned to its alignment, in safetensors not aligned
} GgufTensor;

typedef struct {
    const char *path;           // as given to gguf_open, not copied; "(memory)" after gguf_parse
    uint32_t version, alignment;
    GgufKv *kvs;         size_t n_kvs;      // of a split model: those of its first part
    GgufTensor *tensors; size_t n_tensors;  // of all parts
    size_t file_size, data_start;           // bytes: of all parts together; of the first part
    bool converted;             // made by gguf_from_writer: keys and tensor names are not those of the files
    char err[1024];             // the last failure, one line; "" if there was none
    // private
    const uint8_t *meta;        // the checked metadata: a private copy of the file's head, or gguf_parse's bytes
    uint8_t **copies;           // one private copy per file, which gguf_close frees
    size_t n_copies;
    struct { void *at; size_t size; bool file; } *maps;     // the files, read-only, and private memory
    size_t n_maps;
    uint32_t *kv_index, *tensor_index;      // hash tables: index + 1, 0 = free
    size_t kv_slots, tensor_slots;          // powers of two
} Gguf;

// Opens a GGUF file, or all parts of a split model, given the name of the first part. Copies the metadata to private
// memory and checks it there, then maps the files for the tensor data. Returns 0 or < 0. If another process shortens a
// file while it is open, a later access raises SIGBUS. If it changes bytes of the tensor data, no access goes out of
// bounds.
int gguf_open(Gguf *g, const char *path);
// The same for one file in memory; bytes must stay unchanged until gguf_close. Returns 0 or < 0.
int gguf_parse(Gguf *g, const void *bytes, size_t size);
// Releases everything except err. Allowed after a failed open or parse, and twice.
void gguf_close(Gguf *g);

const GgufKv *gguf_find_kv(const Gguf *g, const char *key);             // NULL: absent
const GgufTensor *gguf_find_tensor(const Gguf *g, const char *name);    // NULL: absent

// Reads one key. Returns 1: found; 0: absent, *out unchanged; -1: wrong type, length or range, see err, *out undefined.
int gguf_get_int(Gguf *g, const char *key, int64_t min, int64_t max, int64_t *out);   // any integer type, and bool
int gguf_get_float(Gguf *g, const char *key, double *out);                            // f32 or f64, finite
int gguf_get_str(Gguf *g, const char *key, GgufStr *out);                             // valid until gguf_close
// n integers: an array (any integer type, or bool) of exactly n elements, or a scalar that stands for all of them.
int gguf_get_ints(Gguf *g, const char *key, int64_t min, int64_t max, int64_t *out, size_t n);
int gguf_get_strs(Gguf *g, const char *key, const GgufStr **out, size_t *n);          // valid until gguf_close
size_t gguf_value_bytes(int value_type);        // bytes of a number or bool, GGUF_V_U8 to _F64; 0: a string or an array

// Returns the index of the first of n blocks that holds a value which no quantiser writes; n: all are good. Scales and
// floats must be finite, MXFP4's exponent must not be 255, NVFP4's scales must have no sign. I8 to I64 and IQ1_M are
// not checked. Opening a file does not call this, because it reads the whole data. Thread-safe.
size_t gguf_find_bad_block(int type, const void *blocks, size_t n);

// Tells the system that these bytes of tensor data are not needed now: it may drop their whole pages from memory. A
// later access reads them from the file again.
void gguf_drop_pages(const Gguf *g, const void *data, size_t size);

// ---- writing a file's head -----------------------------------------------------------------------------------------
// Start from {0}. Keys and tensor infos are written in the order of the calls, offsets are running sums. A file
// consists of the head, then for each tensor its bytes and zeros up to the next multiple of 32. The only possible
// failure is lack of memory: later calls then do nothing, and gguf_writer_head returns NULL. The caller must not pass a
// NULL value, or a name or shape that gguf_parse would reject.

typedef struct {
    uint8_t *kvs, *infos;                   // the bytes of the file's tables
    size_t kvs_size, infos_size, kvs_cap, infos_cap;    // bytes
    uint64_t n_kvs, n_tensors;
    uint64_t data_size;                     // bytes of the tensors so far, padding included
    bool no_memory;
} GgufWriter;

void gguf_put_kv(GgufWriter *w, const GgufKv *kv);          // copies a key of another file; ignores general.alignment
void gguf_put_u32(GgufWriter *w, const char *key, uint32_t v);
void gguf_put_f32(GgufWriter *w, const char *key, float v);
void gguf_put_bool(GgufWriter *w, const char *key, bool v);
void gguf_put_str(GgufWriter *w, const char *key, GgufStr v);
// v: n packed elements of a fixed-size type, or GgufStr[n] if elem_type is GGUF_V_STR.
void gguf_put_array(GgufWriter *w, const char *key, int elem_type, const void *v, size_t n);
void gguf_put_tensor(GgufWriter *w, GgufStr name, int type, int n_dims, const uint64_t *ne);
// Returns the head: *size bytes, a multiple of 32; the caller frees it. NULL: no memory.
uint8_t *gguf_writer_head(const GgufWriter *w, size_t *size);
void gguf_writer_free(GgufWriter *w);
// Opens the file that w describes without writing it: the bytes of tensor i are at data[i], in mappings of `from`,
// which g takes over. The head is checked as in gguf_open. Returns 0 or < 0; closes `from` in either case.
int gguf_from_writer(Gguf *g, const GgufWriter *w, const uint8_t *const *data, Gguf *from);
// Returns size bytes of zeroed memory that gguf_close releases. NULL: see err.
void *gguf_private(Gguf *g, size_t size);

// ---- JSON --------------------------------------------------------------------------------------------------------
// For safetensors headers, configurations, tool declarations and tool calls. A value points into the parsed text, so
// nothing is copied or allocated, and the text must live as long as its values.

enum { GGUF_J_NULL, GGUF_J_FALSE, GGUF_J_TRUE, GGUF_J_NUMBER, GGUF_J_STRING, GGUF_J_ARRAY, GGUF_J_OBJECT };

typedef struct {
    int type;                   // GGUF_J_*
    const char *s;              // n bytes: the value's text, with quotes or brackets
    size_t n;
} GgufJson;

// Checks a whole text (RFC 8259, at most 256 levels deep; strings need not be UTF-8). Returns 0 and the value; or -1,
// the position of the error in *err_at, and in *err what was expected there. The functions below accept only values
// that come from a checked text.
int gguf_json_parse(const char *text, size_t n, GgufJson *value, size_t *err_at, const char **err);
// Steps through an array or object: start with a copy of it in *rest. False: at the end. key may be NULL; it is not set
// for an array. A whole loop takes time linear in the container's text.
bool gguf_json_next(GgufJson *rest, GgufJson *key, GgufJson *value);
bool gguf_json_get(const GgufJson *object, const char *key, GgufJson *out);     // the last member `key`; absent: null
bool gguf_json_is(const GgufJson *string, const char *text);                    // true: a string with this text
// Decodes a string to out, at most string->n bytes; returns their number. A lone surrogate becomes U+FFFD.
size_t gguf_json_string(const GgufJson *string, char *out);
size_t gguf_utf8(uint32_t c, char out[4]);      // writes code point c <= 0x10ffff as UTF-8; returns how many bytes
bool gguf_json_int(const GgufJson *number, int64_t min, int64_t max, int64_t *out);     // false: no such integer
bool gguf_json_float(const GgufJson *number, double *out);                              // false: no finite number

// ---- safetensors -------------------------------------------------------------------------------------------------
// Another container format for the same tensors, published together with a config.json. It is read into the same
// struct: no keys; tensors with their own names, in the file's order; ne[] fastest dimension first (the format has it
// last); n_dims 0 for a scalar. If there are more than four dimensions, the slowest ones are multiplied into ne[3]. A
// dimension may be 0. type is -1 for dtypes without a GGUF type (BOOL, U8, U16, U32, U64, C64, F8_*, F6_*, F4). data
// may be unaligned.
//
// FILE  n u64, at most 100,000,000
//       n bytes of JSON  {"name": {"dtype": "BF16", "shape": [rows, cols], "data_offsets": [begin, end]}, ...}
//       the data; offsets are relative to its start. "__metadata__" is ignored. The tensors cover the data without
//       overlap and gaps; the bytes of a tensor are the product of shape and dtype.

// Opens one file, or several: an index (*.index.json), the first of -00001-of-0000N, or a folder with
// model.safetensors, an index or such a set. Copies and checks the headers, maps the files. Returns 0 or < 0; if there
// are several files, err starts with the name of one.
int gguf_open_safetensors(Gguf *g, const char *path);
// The same for one file in memory; bytes must stay unchanged until gguf_close. Returns 0 or < 0.
int gguf_parse_safetensors(Gguf *g, const void *bytes, size_t size);

// ---- block formats -----------------------------------------------------------------------------------------------
// The functions below do not check their preconditions. Check a file's types once, with gguf_type_supported and
// gguf_row_size, when the tensor is bound.

const char *gguf_type_name(int type);           // "unknown" for an unknown or removed id
int gguf_block_elems(int type);                 // elements per block; 0 for an unknown or removed id
int gguf_block_bytes(int type);                 // bytes per block; 0 likewise
bool gguf_type_supported(int type);             // the types of the BLOCKS table
size_t gguf_row_size(int type, size_t n);       // bytes of n elements; 0: n is too large, or no multiple of the block

// Converts n elements (a multiple of the block) of a supported type to f32: exact, or correctly rounded for formulas
// that add two terms.
void gguf_dequantize(int type, const void *src, float *dst, size_t n);

// Quantises n floats (a multiple of the block) to a supported type. There are no importance weights; each block depends
// on its own values only. All in f32 in a fixed order, so the bytes are the same on every machine. If a block has a NaN
// or Inf, or scales that overflow binary16, the result is an unspecified block whose values may be NaN or Inf.
void gguf_quantize(int type, const float *src, void *dst, size_t n);

// Quantises activations to int8 in groups of 32 (n a multiple of 32). This rounding is part of the model's definition:
// every backend reproduces it bit for bit. Per group, in f32, IEEE division, with a = max|x|:
//   scale = a / 127;  q[i] = x[i] * (127 / a) rounded to the nearest integer, ties to even;  |q| <= 127
//   a < 2^-120, which includes all zeros:  scale = 0, q = 0    (127 / a would overflow)
//   any NaN or Inf among the 32:           scale = NaN, q = 0  (so that the result is NaN too)
void gguf_quantize_q8(const float *x, int8_t *q, float *scale, size_t n);

// Returns sum_i row[i]*x[i] for a row of n elements of F32, F16 or BF16; any n.
// In f32: each product is rounded, then added to partial sum i % 32, i ascending; the 32 sums are then added pairwise
// (j += j+16, then 8, 4, 2, 1). The order of additions does not depend on the compiler or its vector width.
float gguf_dot_f32(int type, const void *row, const float *x, size_t n);

// The same for n_w weight rows, w_stride bytes apart, and n_rows rows of x, x_stride floats apart. For weight row i and
// row r of x, out[r*out_stride + i] has exactly the bits of gguf_dot_f32. Each weight is converted once per four rows
// of x.
void gguf_dot_f32_rows(int type, const void *w, size_t n_w, size_t w_stride, const float *x, size_t n_rows,
                       size_t x_stride, size_t n, float *out, size_t out_stride);

// Returns sum_i row[i]*(scale[i/32]*q[i]) for a row of n elements of a quantised type (n a multiple of 32 and of the
// block); |q| <= 127. Per group g of 32, with integers I and M below 2^24, which are exact in f32 too:
//   Q8_0 Q4_0 Q5_0 IQ4_NL MXFP4   term(g) = (d*scale[g]) * I     I = sum c*q    c: offset removed, T[c] or V[c];
//   IQ4_XS                        term(g) = (d*scale[g]) * I     I = sc * sum c*q     MXFP4: d = 2^(e-128)
//   Q3_K Q6_K                     term(g) = (d*scale[g]) * I     I = sum over both 16s of sc * sum c*q
//   Q4_1 Q5_1                     term(g) = (d*scale[g]) * I + (m*scale[g]) * M       I = sum c*q, M = sum q
//   Q4_K Q5_K                     term(g) = (d*scale[g]) * I - (dmin*scale[g]) * M    I = sc * sum c*q, M = mn * sum q
//   Q2_K                          the same, I and M being sums over both 16s
//   NVFP4                         term(g) = (s0/2*scale[g]) * I0 + (s1/2*scale[g]) * I1    one scale and sum per 16
// each product, sum and difference rounded to f32. term(g) is added to partial sum g % 8, g ascending; the 8 sums are
// then added pairwise (j += j+4, then 2, 1). The error is at most 2e-6 * sum_g |term(g)|, where a term with two
// products counts both magnitudes, unless products are subnormal.
float gguf_dot_q8(int type, const void *row, const int8_t *q, const float *scale, size_t n);

// The same for n_w consecutive weight rows and n_rows consecutive packed activation rows: out[r*out_stride + i] has
// exactly the bits of gguf_dot_q8 for weight row i and activation row r. This is the fast form, for a single row too:
// activations are packed once for all weight rows, and each weight block is unpacked once for 32 rows or more. To use
// several threads, give each thread a range of weight rows. A packed row takes gguf_packed_size(n) bytes, at an address
// aligned for float (64 bytes is best). Its layout depends on the build; do not store it in files.
size_t gguf_packed_size(size_t n);
void gguf_pack_q8(const int8_t *q, const float *scale, size_t n, void *packed);     // one row; n a multiple of 32
void gguf_dot_q8_rows(int type, const void *w, size_t n_w, const void *packed, size_t n_rows, size_t n,
                      float *out, size_t out_stride);

// Executes n times eight of the instructions that multiply int8 for many rows, on registers alone, to measure how fast
// they can be. Returns the number of multiplications; 0: the build has no 512-bit VNNI, and does not know.
double gguf_multiply_int8(size_t n);

// Scalar conversions. To f32: exact. From f32: rounded to nearest, ties to even; a NaN stays NaN.
static inline float gguf_bf16_to_f32(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static inline uint16_t gguf_f32_to_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 64);     // NaN: rounding could carry it into Inf
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static inline float gguf_f16_to_f32(uint16_t h) {
#ifdef __F16C__
    return _cvtsh_ss(h);
#else
    uint32_t em = (h & 0x7fffu) << 13, u;       // exponent and mantissa, moved to their bits of a binary32
    float f;
    if (em >= 0x0f800000) {                     // Inf, NaN (made quiet)
        u = 0x70000000 + em;
        if (u > 0x7f800000) u |= 0x00400000;
    } else if (em >= 0x00800000) {              // normal: the bias differs by 112
        u = em + 0x38000000;
    } else {                                    // zero, subnormal: mantissa * 2^-24
        f = (float)(h & 0x7fff) * 0x1p-24f;
        memcpy(&u, &f, 4);
    }
    u |= (uint32_t)(h & 0x8000u) << 16;
    memcpy(&f, &u, 4);
    return f;
#endif
}

static inline uint16_t gguf_f32_to_f16(float f) {
#ifdef __F16C__
    return (uint16_t)_cvtss_sh(f, 0);           // 0: to nearest, ties to even
#else
    uint32_t u, sign, r;
    memcpy(&u, &f, 4);
    sign = u >> 16 & 0x8000;
    u &= 0x7fffffff;
    if (u > 0x7f800000) {                       // NaN: quiet, upper payload bits kept
        r = 0x7e00 | (u >> 13 & 0x3ff);
    } else if (u >= 0x47800000) {               // 65536 and above: Inf. Rounding up to 65536 gives Inf too, below
        r = 0x7c00;
    } else if (u >= 0x38800000) {               // normal
        r = (u - 0x38000000 + 0xfff + (u >> 13 & 1)) >> 13;
    } else if (u >= 0x33000000) {               // subnormal: mantissa in units of 2^-24
        uint32_t m = (u & 0x007fffff) | 0x00800000, shift = 126 - (u >> 23);        // 14..24
        uint32_t half = 1u << (shift - 1), rest = m & (2 * half - 1);
        r = m >> shift;
        r += rest > half || (rest == half && (r & 1));
    } else {                                    // below 2^-25
        r = 0;
    }
    return (uint16_t)(sign | r);
#endif
}

#ifdef __cplusplus
}
#endif
#endif // GGUF_H

#ifdef GGUF_IMPLEMENTATION
#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

// ---- limits and tables -------------------------------------------------------------------------------------------

#define GGUF__KEY_MAX    65535              // bytes, the published rule
#define GGUF__NAME_MAX   63                 // bytes
#define GGUF__COUNT_MAX  65536              // keys; tensors
#define GGUF__KV_MIN     14                 // bytes of the smallest entry: 8 + 1 + 4 + 1
#define GGUF__TENSOR_MIN 33                 // bytes of the smallest info: 8 + 1 + 4 + 8 + 4 + 8
#define GGUF__META_MAX   ((size_t)1 << 28)  // bytes of metadata; real files have 16 MB
#define GGUF__SPLIT_MAX  256                // parts of a split model

static const struct {
    const char *name;
    uint16_t elems, bytes;                  // of one block; elems = 0: removed from the format
    bool supported;
} gguf__types[GGUF_N_TYPES] = {
    [GGUF_F32]     = {"F32", 1, 4, true},         [GGUF_F16]    = {"F16", 1, 2, true},
    [GGUF_Q4_0]    = {"Q4_0", 32, 18, true},      [GGUF_Q4_1]   = {"Q4_1", 32, 20, true},
    [GGUF_Q5_0]    = {"Q5_0", 32, 22, true},      [GGUF_Q5_1]   = {"Q5_1", 32, 24, true},
    [GGUF_Q8_0]    = {"Q8_0", 32, 34, true},      [GGUF_Q8_1]   = {"Q8_1", 32, 36, false},
    [GGUF_Q2_K]    = {"Q2_K", 256, 84, true},     [GGUF_Q3_K]   = {"Q3_K", 256, 110, true},
    [GGUF_Q4_K]    = {"Q4_K", 256, 144, true},    [GGUF_Q5_K]   = {"Q5_K", 256, 176, true},
    [GGUF_Q6_K]    = {"Q6_K", 256, 210, true},    [GGUF_Q8_K]   = {"Q8_K", 256, 292, false},
    [GGUF_IQ2_XXS] = {"IQ2_XXS", 256, 66, false}, [GGUF_IQ2_XS] = {"IQ2_XS", 256, 74, false},
    [GGUF_IQ3_XXS] = {"IQ3_XXS", 256, 98, false}, [GGUF_IQ1_S]  = {"IQ1_S", 256, 50, false},
    [GGUF_IQ4_NL]  = {"IQ4_NL", 32, 18, true},    [GGUF_IQ3_S]  = {"IQ3_S", 256, 110, false},
    [GGUF_IQ2_S]   = {"IQ2_S", 256, 82, false},   [GGUF_IQ4_XS] = {"IQ4_XS", 256, 136, true},
    [GGUF_I8]      = {"I8", 1, 1, false},         [GGUF_I16]    = {"I16", 1, 2, false},
    [GGUF_I32]     = {"I32", 1, 4, false},        [GGUF_I64]    = {"I64", 1, 8, false},
    [GGUF_F64]     = {"F64", 1, 8, false},        [GGUF_IQ1_M]  = {"IQ1_M", 256, 56, false},
    [GGUF_BF16]    = {"BF16", 1, 2, true},        [GGUF_TQ1_0]  = {"TQ1_0", 256, 54, false},
    [GGUF_TQ2_0]   = {"TQ2_0", 256, 66, false},   [GGUF_MXFP4]  = {"MXFP4", 32, 17, true},
    [GGUF_NVFP4]   = {"NVFP4", 64, 36, true},     [GGUF_Q1_0]   = {"Q1_0", 128, 18, false},
    [GGUF_Q2_0]    = {"Q2_0", 64, 18, false},
};

static const struct {
    const char *name;
    uint8_t bytes;                          // 0: variable
    bool is_int;
} gguf__values[GGUF_V_F64 + 1] = {
    {"u8", 1, true}, {"i8", 1, true}, {"u16", 2, true}, {"i16", 2, true}, {"u32", 4, true}, {"i32", 4, true},
    {"f32", 4, false}, {"bool", 1, true}, {"string", 0, false}, {"array", 0, false},
    {"u64", 8, true}, {"i64", 8, true}, {"f64", 8, false},
};

static bool gguf__type_known(int type) { return type >= 0 && type < GGUF_N_TYPES && gguf__types[type].elems != 0; }
const char *gguf_type_name(int type) { return gguf__type_known(type) ? gguf__types[type].name : "unknown"; }
size_t gguf_value_bytes(int t) { return t >= 0 && t <= GGUF_V_F64 ? gguf__values[t].bytes : 0; }
int gguf_block_elems(int type) { return gguf__type_known(type) ? gguf__types[type].elems : 0; }
int gguf_block_bytes(int type) { return gguf__type_known(type) ? gguf__types[type].bytes : 0; }
bool gguf_type_supported(int type) { return gguf__type_known(type) && gguf__types[type].supported; }

size_t gguf_row_size(int type, size_t n) {
    if (!gguf__type_known(type) || n % gguf__types[type].elems != 0) return 0;
    size_t blocks = n / gguf__types[type].elems;
    return blocks <= SIZE_MAX / gguf__types[type].bytes ? blocks * gguf__types[type].bytes : 0;
}

// ---- errors ------------------------------------------------------------------------------------------------------

enum { GGUF__SHOWN_MAX = 64 * 4 + 4 };      // most bytes that gguf__shown writes

// Writes the first 64 bytes of a name, with unprintable bytes escaped. Returns out.
static const char *gguf__shown(GgufStr name, char out[GGUF__SHOWN_MAX]) {
    size_t n = 0;
    for (size_t i = 0; i < name.n && i < 64; i++) {
        unsigned char ch = (unsigned char)name.s[i];
        n += (size_t)snprintf(out + n, 5, ch > 0x20 && ch < 0x7f && ch != '\\' ? "%c" : "\\x%02x", ch);
    }
    strcpy(out + n, name.n > 64 ? "..." : "");
    return out;
}

// Fills g->err with "<kind> '<name>': <message> (<code> at byte <at>)" and returns -1. An empty name is omitted, a long
// one truncated, so that all fits into err. Kind "file": the file as a whole, "<message> (<code>)".
#ifdef __GNUC__
__attribute__((format(printf, 6, 7)))
#endif
static int gguf__fail(Gguf *g, const char *kind, GgufStr name, const char *code, size_t at, const char *fmt, ...) {
    char shown[GGUF__SHOWN_MAX], message[160];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(message, sizeof message, fmt, ap);
    va_end(ap);
    if (!strcmp(kind, "file") && !at) snprintf(g->err, sizeof g->err, "%s (%s)", message, code);
    else snprintf(g->err, sizeof g->err, name.n ? "%s '%s': %s (%s at byte %zu)" : "%s%s: %s (%s at byte %zu)", kind,
                  gguf__shown(name, shown), message, code, at);
    return -1;
}

// ---- tables by name ----------------------------------------------------------------------------------------------
// Keys and tensors are found through hash tables of indices with open addressing. Duplicates are found while the tables
// are filled: comparing all pairs would take minutes for a file of 65,536 keys. The hash is seeded with the table's
// address, which the author of a malicious file cannot predict.

static GgufStr gguf__str(const char *s) { return (GgufStr){s, strlen(s)}; }

static uint64_t gguf__hash(GgufStr s, const void *seed) {
    uint64_t h = 0xcbf29ce484222325u ^ (uint64_t)(uintptr_t)seed * 0x9e3779b97f4a7c15u;     // FNV-1a from there on
    for (size_t i = 0; i < s.n; i++) h = (h ^ (unsigned char)s.s[i]) * 0x100000001b3u;
    return h ^ h >> 32;
}

// The slot of `name`, or the free slot for it. items: structs of `stride` bytes that start with their name.
static size_t gguf__slot(const uint32_t *index, size_t slots, const void *items, size_t stride, GgufStr name) {
    size_t i = (size_t)gguf__hash(name, index) & (slots - 1);
    for (; index[i] != 0; i = (i + 1) & (slots - 1)) {      // the table is at most half full, so the loop ends
        const GgufStr *other = (const GgufStr *)(const void *)((const char *)items + (index[i] - 1) * stride);
        if (other->n == name.n && memcmp(other->s, name.s, name.n) == 0) break;
    }
    return i;
}

const GgufKv *gguf_find_kv(const Gguf *g, const char *key) {
    if (g->kv_slots == 0) return NULL;
    size_t slot = gguf__slot(g->kv_index, g->kv_slots, g->kvs, sizeof(GgufKv), gguf__str(key));
    uint32_t i = g->kv_index[slot];
    if (i && !g->kvs[i - 1].read) g->kvs[i - 1].read = true;
    return i ? &g->kvs[i - 1] : NULL;
}

static uint32_t *gguf__tensor_slot(const Gguf *g, GgufStr name) {
    return &g->tensor_index[gguf__slot(g->tensor_index, g->tensor_slots, g->tensors, sizeof(GgufTensor), name)];
}

const GgufTensor *gguf_find_tensor(const Gguf *g, const char *name) {
    if (g->tensor_slots == 0) return NULL;
    uint32_t i = *gguf__tensor_slot(g, gguf__str(name));
    return i ? &g->tensors[i - 1] : NULL;
}

// ---- parsing -----------------------------------------------------------------------------------------------------
// All reads go through one cursor and gguf__need(n), which fails unless n <= size - pos. pos <= size always holds, so
// the subtraction cannot wrap; "pos + n <= size" could. Only the first `loaded` bytes of the file are in memory. If a
// field is not among them, parsing returns GGUF__MORE, and the caller starts again with a longer copy, so that pointers
// never move.

enum { GGUF__MORE = 1 };

typedef struct {
    Gguf *g;
    const uint8_t *base;
    size_t pos, loaded, size;       // bytes
    const char *kind;               // what an error names: "header", "key", "tensor"
    GgufStr name;
} Gguf__Cursor;

#define GGUF__TRY(call) do { int result_ = (call); if (result_ != 0) return result_; } while (0)
#define GGUF__FAIL(c, code, at, ...) gguf__fail((c)->g, (c)->kind, (c)->name, code, at, __VA_ARGS__)

static int gguf__need(Gguf__Cursor *c, uint64_t n, const char *field) {
    if (n > c->size - c->pos)
        return GGUF__FAIL(c, "E_TRUNC", c->pos, "%s: expected %llu bytes, got %zu before the end of the file", field,
                          (unsigned long long)n, c->size - c->pos);
    return n > c->loaded - c->pos ? GGUF__MORE : 0;
}

// Little-endian fields at the cursor, after gguf__need.
static uint32_t gguf__u32(Gguf__Cursor *c) {
    uint32_t v;
    memcpy(&v, c->base + c->pos, 4);
    c->pos += 4;
    return v;
}

static uint64_t gguf__u64(Gguf__Cursor *c) {
    uint64_t v;
    memcpy(&v, c->base + c->pos, 8);
    c->pos += 8;
    return v;
}

// Reads a key or tensor name of 1..max bytes 0x21..0x7e. It has no NUL, so different names are different C strings.
static int gguf__name(Gguf__Cursor *c, size_t max, const char *e_len, const char *e_char, GgufStr *out) {
    size_t at = c->pos;
    GGUF__TRY(gguf__need(c, 8, "name length"));
    uint64_t n = gguf__u64(c);
    if (n < 1 || n > max)
        return GGUF__FAIL(c, e_len, at, "expected a name of 1..%zu bytes, got %llu", max, (unsigned long long)n);
    GGUF__TRY(gguf__need(c, n, "name"));
    *out = c->name = (GgufStr){(const char *)c->base + c->pos, (size_t)n};
    for (size_t i = 0; i < out->n; i++) {
        unsigned char ch = (unsigned char)out->s[i];
        if (ch < 0x21 || ch > 0x7e)
            return GGUF__FAIL(c, e_char, c->pos + i, "expected a name of bytes 0x21..0x7e, got 0x%02x", ch);
    }
    c->pos += out->n;
    return 0;
}

// Skips n packed values of a fixed-size type. The caller has checked that they are inside the file.
static int gguf__scalars(Gguf__Cursor *c, int type, uint64_t n) {
    uint64_t bytes = n * gguf__values[type].bytes;
    GGUF__TRY(gguf__need(c, bytes, "value"));
    for (size_t i = 0; type == GGUF_V_BOOL && i < n; i++) {
        unsigned v = c->base[c->pos + i];
        if (v > 1) return GGUF__FAIL(c, "E_KV_BOOL", c->pos + i, "expected a bool of 0 or 1, got %u", v);
    }
    c->pos += (size_t)bytes;
    return 0;
}

static int gguf__string(Gguf__Cursor *c, GgufStr *out) {
    GGUF__TRY(gguf__need(c, 8, "string length"));
    uint64_t n = gguf__u64(c);
    GGUF__TRY(gguf__need(c, n, "string"));
    *out = (GgufStr){(const char *)c->base + c->pos, (size_t)n};
    c->pos += out->n;
    return 0;
}

static int gguf__array(Gguf__Cursor *c, GgufKv *kv) {
    size_t at = c->pos;
    GGUF__TRY(gguf__need(c, 12, "array head"));
    uint32_t type = gguf__u32(c);
    if (type == GGUF_V_ARRAY) return GGUF__FAIL(c, "E_ARR_NEST", at, "expected a flat array, got an array of arrays");
    if (type > GGUF_V_F64)
        return GGUF__FAIL(c, "E_ARR_TYPE", at, "expected an element type 0..12, got %d", (int)(int32_t)type);
    kv->elem_type = (int)type;
    kv->count = gguf__u64(c);
    kv->data = c->base + c->pos;
    size_t least = type == GGUF_V_STR ? 8 : gguf__values[type].bytes;       // smallest size of an element
    if (kv->count > (c->size - c->pos) / least)
        return GGUF__FAIL(c, "E_ARR_LEN", c->pos - 8, "expected at most %zu elements in the rest of the file, got %llu",
                          (c->size - c->pos) / least, (unsigned long long)kv->count);
    if (type != GGUF_V_STR) return gguf__scalars(c, (int)type, kv->count);
    GGUF__TRY(gguf__need(c, kv->count * 8, "array"));                       // before memory for strings is allocated
    if (kv->count == 0) return 0;
    kv->strs = (GgufStr *)calloc((size_t)kv->count, sizeof(GgufStr));
    if (!kv->strs)
        return GGUF__FAIL(c, "E_NOMEM", c->pos, "out of memory for %llu strings", (unsigned long long)kv->count);
    for (size_t i = 0; i < kv->count; i++) GGUF__TRY(gguf__string(c, &kv->strs[i]));
    return 0;
}

static int gguf__kv(Gguf__Cursor *c, GgufKv *kv) {
    GGUF__TRY(gguf__name(c, GGUF__KEY_MAX, "E_KEY_LEN", "E_KEY_CHAR", &kv->key));
    size_t at = c->pos;
    GGUF__TRY(gguf__need(c, 4, "value type"));
    uint32_t type = gguf__u32(c);
    if (type > GGUF_V_F64)
        return GGUF__FAIL(c, "E_KV_TYPE", at, "expected a value type 0..12, got %d", (int)(int32_t)type);
    kv->type = kv->elem_type = (int)type;
    kv->count = 1;
    kv->data = c->base + c->pos;
    if (type == GGUF_V_ARRAY) return gguf__array(c, kv);
    if (type != GGUF_V_STR) return gguf__scalars(c, (int)type, 1);
    GgufStr s;
    GGUF__TRY(gguf__string(c, &s));
    kv->count = s.n;
    kv->data = (const uint8_t *)s.s;
    return 0;
}

// Reads dimensions, type and offset, and computes the size. The offset is checked later, when data_start is known.
static int gguf__tensor(Gguf__Cursor *c, GgufTensor *t) {
    size_t at = c->pos;
    GGUF__TRY(gguf__need(c, 4, "n_dims"));
    uint32_t n_dims = gguf__u32(c);
    if (n_dims < 1 || n_dims > 4)
        return GGUF__FAIL(c, "E_NDIMS", at, "expected 1..4 dimensions, got %u", (unsigned)n_dims);
    t->n_dims = (int)n_dims;
    GGUF__TRY(gguf__need(c, 8 * (uint64_t)n_dims + 12, "dimensions"));
    // No format stores more than 8 elements per byte (Q1_0: 7.1), so this limit holds for every real tensor. It also
    // keeps the products below from wrapping.
    uint64_t n = 1, limit = 8 * (uint64_t)c->size;
    for (int d = 0; d < 4; d++) {
        at = c->pos;
        uint64_t ne = t->ne[d] = d < t->n_dims ? gguf__u64(c) : 1;
        if (ne == 0) return GGUF__FAIL(c, "E_DIM", at, "dimension %d: expected at least 1, got 0", d);
        if (ne > limit / n)
            return GGUF__FAIL(c, "E_NELEM", at, "dimension %d: expected at most %llu for a file of this size, got %llu",
                              d, (unsigned long long)(limit / n), (unsigned long long)ne);
        n *= ne;
    }
    at = c->pos;
    int type = (int)(int32_t)gguf__u32(c);
    if (type < 0 || type >= GGUF_N_TYPES)
        return GGUF__FAIL(c, "E_TYPE_UNKNOWN", at, "expected a tensor type 0..%d, got %d", GGUF_N_TYPES - 1, type);
    if (!gguf__type_known(type))
        return GGUF__FAIL(c, "E_TYPE_REMOVED", at, "expected a supported tensor type, got %d, which the format no "
                                                   "longer has",
                          type);
    t->type = type;
    uint64_t elems = gguf__types[type].elems, bytes = gguf__types[type].bytes;
    if (t->ne[0] % elems != 0)
        return GGUF__FAIL(c, "E_ROW", at, "expected rows with a multiple of %d elements for %s, got %llu", (int)elems,
                          gguf__types[type].name, (unsigned long long)t->ne[0]);
    if (n / elems > SIZE_MAX / bytes)
        return GGUF__FAIL(c, "E_NBYTES", at, "expected a size below 2^%d bytes, got %llu blocks of %d",
                          (int)(8 * sizeof(size_t)), (unsigned long long)(n / elems), (int)bytes);
    t->size = n / elems * bytes;
    t->offset = gguf__u64(c);
    return 0;
}

static int gguf__alignment(Gguf__Cursor *c) {
    const GgufKv *kv = gguf_find_kv(c->g, "general.alignment");
    uint32_t v = 32;
    if (kv) {
        size_t at = (size_t)(kv->data - c->base);
        c->kind = "key";
        c->name = kv->key;
        if (kv->type != GGUF_V_U32)
            return GGUF__FAIL(c, "E_ALIGN_TYPE", at, "expected u32, got %s", gguf__values[kv->type].name);
        memcpy(&v, kv->data, 4);
        if (v < 8 || v > 65536 || (v & (v - 1)) != 0)
            return GGUF__FAIL(c, "E_ALIGN", at, "expected a power of two in 8..65536, got %u", (unsigned)v);
    }
    c->g->alignment = v;
    return 0;
}

static uint64_t gguf__pad(uint64_t at, uint64_t alignment) { return (alignment - at % alignment) % alignment; }

// Checks that offsets are the running sum of the padded sizes. All numbers here are known to be at most the size of the
// file, so no sum wraps.
static int gguf__place(Gguf__Cursor *c) {
    Gguf *g = c->g;
    uint64_t align = g->alignment, expect = 0;
    if (g->n_tensors == 0) return 0;            // such a file may end without the padding
    uint64_t pad = gguf__pad(c->pos, align);
    if (pad > c->size - c->pos) {
        c->kind = "file";
        c->name = (GgufStr){0};
        return GGUF__FAIL(c, "E_DATA_START", c->pos, "expected %d bytes of padding before the data, got %zu", (int)pad,
                          c->size - c->pos);
    }
    g->data_start = c->pos + (size_t)pad;
    uint64_t avail = c->size - g->data_start;
    c->kind = "tensor";
    for (size_t i = 0; i < g->n_tensors; i++) {
        GgufTensor *t = &g->tensors[i];
        unsigned long long offset = t->offset, size = t->size;
        size_t at = (size_t)((const uint8_t *)t->name.s - c->base) + t->name.n + 4 + 8 * (size_t)t->n_dims + 4;
        c->name = t->name;
        if (offset % align != 0)
            return GGUF__FAIL(c, "E_OFF_ALIGN", at, "expected a multiple of %d as offset, got %llu", (int)align,
                              offset);
        if (offset != expect)
            return GGUF__FAIL(c, "E_OFF_SEQ", at, "expected offset %llu, right after the previous tensor, got %llu",
                              (unsigned long long)expect, offset);
        if (offset > avail || size > avail - offset)
            return GGUF__FAIL(c, "E_OFF_RANGE", at, "expected %llu bytes at offset %llu, got a data section of %llu",
                              size, offset, (unsigned long long)avail);
        expect = offset + size + gguf__pad(offset + size, align);
    }
    return 0;
}

// Allocates n zeroed items and their hash table, at most half full.
static int gguf__tables(Gguf__Cursor *c, size_t n, size_t item, void **items, uint32_t **index, size_t *slots) {
    if (n == 0) return 0;
    *slots = 4;
    while (*slots < 2 * n) *slots *= 2;
    *items = calloc(n, item);
    *index = (uint32_t *)calloc(*slots, sizeof(uint32_t));
    return *items && *index ? 0 : GGUF__FAIL(c, "E_NOMEM", c->pos, "out of memory for %zu entries", n);
}

// Parses the file's head: all checks of the container, in the order in which errors are reported. 0, < 0, or
// GGUF__MORE.
static int gguf__metadata(Gguf *g, const uint8_t *bytes, size_t loaded, size_t size) {
    Gguf__Cursor cursor = {g, bytes, 0, loaded, size, "header", {0}}, *c = &cursor;
    g->meta = bytes;
    g->file_size = size;
    GGUF__TRY(gguf__need(c, 24, "header"));
    if (memcmp(bytes, "GGUF", 4) != 0)
        return gguf__fail(g, "file", (GgufStr){0}, "E_MAGIC", 0,
                          "this is not a GGUF file: expected 47 47 55 46 (GGUF), got %02x %02x %02x %02x", bytes[0],
                          bytes[1], bytes[2], bytes[3]);
    c->pos = 4;
    g->version = gguf__u32(c);
    if ((g->version & 0xffff) == 0)
        return GGUF__FAIL(c, "E_ENDIAN", 4, "version: expected 2 or 3, got 0x%08x, as in a big-endian file",
                          (unsigned)g->version);
    if (g->version != 2 && g->version != 3)
        return GGUF__FAIL(c, "E_VERSION", 4, "version: expected 2 or 3, got %u", (unsigned)g->version);

    uint64_t n_tensors = gguf__u64(c), n_kvs = gguf__u64(c), rest = size - 24;
    if (n_tensors > GGUF__COUNT_MAX)
        return GGUF__FAIL(c, "E_NTENSORS", 8, "tensor count: expected at most %d, got %llu", GGUF__COUNT_MAX,
                          (unsigned long long)n_tensors);
    if (n_kvs > GGUF__COUNT_MAX || n_kvs * GGUF__KV_MIN > rest)
        return GGUF__FAIL(c, "E_NKV", 16, "key count: expected at most %d, with at least %d bytes per key, got %llu",
                          GGUF__COUNT_MAX, GGUF__KV_MIN, (unsigned long long)n_kvs);
    if (n_tensors * GGUF__TENSOR_MIN > rest - n_kvs * GGUF__KV_MIN)
        return GGUF__FAIL(c, "E_NTENSORS", 8, "tensor count: expected at least %d bytes per tensor, got %llu tensors",
                          GGUF__TENSOR_MIN, (unsigned long long)n_tensors);
    void *kvs = NULL, *tensors = NULL;
    int failed = gguf__tables(c, (size_t)n_kvs, sizeof(GgufKv), &kvs, &g->kv_index, &g->kv_slots);
    if (!failed)
        failed = gguf__tables(c, (size_t)n_tensors, sizeof(GgufTensor), &tensors, &g->tensor_index, &g->tensor_slots);
    g->kvs = (GgufKv *)kvs;
    g->tensors = (GgufTensor *)tensors;
    if (failed) return failed;

    for (size_t i = 0; i < n_kvs; i++) {
        c->kind = "key";
        c->name = (GgufStr){0};
        size_t at = c->pos;
        g->n_kvs = i + 1;                       // now gguf_close frees its strings
        GGUF__TRY(gguf__kv(c, &g->kvs[i]));
        size_t slot = gguf__slot(g->kv_index, g->kv_slots, g->kvs, sizeof(GgufKv), g->kvs[i].key);
        if (g->kv_index[slot]) return GGUF__FAIL(c, "E_KEY_DUP", at, "expected each key once, got a duplicate");
        g->kv_index[slot] = (uint32_t)i + 1;
    }
    GGUF__TRY(gguf__alignment(c));
    for (size_t i = 0; i < n_tensors; i++) {
        GgufTensor *t = &g->tensors[i];
        c->kind = "tensor";
        c->name = (GgufStr){0};
        size_t at = c->pos;
        GGUF__TRY(gguf__name(c, GGUF__NAME_MAX, "E_NAME_LEN", "E_NAME_CHAR", &t->name));
        size_t slot = gguf__slot(g->tensor_index, g->tensor_slots, g->tensors, sizeof(GgufTensor), t->name);
        if (g->tensor_index[slot]) return GGUF__FAIL(c, "E_NAME_DUP", at, "expected each name once, got a duplicate");
        g->tensor_index[slot] = (uint32_t)i + 1;
        GGUF__TRY(gguf__tensor(c, t));
    }
    g->n_tensors = (size_t)n_tensors;
    return gguf__place(c);
}

static void gguf__free_tables(Gguf *g) {
    for (size_t i = 0; i < g->n_kvs; i++) free(g->kvs[i].strs);
    free(g->kvs);
    free(g->tensors);
    free(g->kv_index);
    free(g->tensor_index);
    g->kvs = NULL;
    g->tensors = NULL;
    g->kv_index = g->tensor_index = NULL;
    g->n_kvs = g->n_tensors = g->kv_slots = g->tensor_slots = 0;
}

void gguf_close(Gguf *g) {
    gguf__free_tables(g);
    for (size_t i = 0; i < g->n_copies; i++) free(g->copies[i]);
    for (size_t i = 0; i < g->n_maps; i++) munmap(g->maps[i].at, g->maps[i].size);
    free(g->copies);
    free(g->maps);
    g->copies = NULL;
    g->meta = NULL;
    g->maps = NULL;
    g->n_copies = g->n_maps = 0;
}

// Sets the data pointers of all tensors. data: the whole file in memory.
static void gguf__bind(Gguf *g, const uint8_t *data) {
    for (size_t i = 0; i < g->n_tensors; i++) g->tensors[i].data = data + g->data_start + (size_t)g->tensors[i].offset;
}

// Maps one more file (fd -1: zeroed private memory); gguf_close unmaps it. NULL: see err.
static void *gguf__map(Gguf *g, int fd, size_t size) {
    void *maps = realloc(g->maps, (g->n_maps + 1) * sizeof *g->maps);
    if (!maps) return gguf__fail(g, "file", (GgufStr){0}, "E_NOMEM", 0, "out of memory for a mapping"), NULL;
    g->maps = maps;
    void *at = fd >= 0 ? mmap(NULL, size, PROT_READ, MAP_PRIVATE, fd, 0)
                       : mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        return gguf__fail(g, "file", (GgufStr){0}, "E_MAP", 0, "cannot map %zu bytes: %s", size, strerror(errno)), NULL;
    g->maps[g->n_maps].at = at;
    g->maps[g->n_maps].file = fd >= 0;
    g->maps[g->n_maps++].size = size;
    return at;
}

void *gguf_private(Gguf *g, size_t size) { return gguf__map(g, -1, size ? size : 1); }

void gguf_drop_pages(const Gguf *g, const void *data, size_t size) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t from = ((uintptr_t)data + page - 1) / page * page, end = ((uintptr_t)data + size) / page * page;
    for (size_t i = 0; i < g->n_maps && from < end; i++) {
        const uintptr_t at = (uintptr_t)g->maps[i].at;
        if (!g->maps[i].file || from < at || end > at + g->maps[i].size) continue;
#ifdef MADV_PAGEOUT
        madvise((void *)from, end - from, MADV_PAGEOUT);       // from the page cache too, if the user owns the file
#endif
        madvise((void *)from, end - from, MADV_DONTNEED);
    }
}

// Opens a regular file for reading. Returns its descriptor and size, or -1. code: the error code if it cannot be
// opened.
static int gguf__open_regular(Gguf *g, const char *path, const char *code, size_t *size) {
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);         // NONBLOCK: opening a FIFO must not block
    if (fd < 0) return gguf__fail(g, "file", (GgufStr){0}, code, 0, "cannot open: %s", strerror(errno));
    int failed = 0;
    if (fstat(fd, &st) != 0)
        failed = gguf__fail(g, "file", (GgufStr){0}, "E_STAT", 0, "cannot stat: %s", strerror(errno));
    else if (!S_ISREG(st.st_mode))
        failed = gguf__fail(g, "file", (GgufStr){0}, "E_NOTFILE", 0, "expected a regular file");
    else if ((uint64_t)st.st_size > SIZE_MAX / 16)
        failed = gguf__fail(g, "file", (GgufStr){0}, "E_MAP", 0, "expected a size that fits memory, got %lld",
                            (long long)st.st_size);
    if (failed) close(fd);
    else *size = (size_t)st.st_size;
    return failed ? -1 : fd;
}

// Reads exactly n bytes at offset `at`. 0 or -1.
static int gguf__read(Gguf *g, int fd, void *to, size_t n, size_t at) {
    for (size_t have = 0; have < n; ) {
        ssize_t got = pread(fd, (uint8_t *)to + have, n - have, (off_t)(at + have));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0)
            return gguf__fail(g, "file", (GgufStr){0}, "E_TRUNC", at + have, "expected %zu more bytes, got %s",
                              n - have, got < 0 ? strerror(errno) : "the end of the file");
        have += (size_t)got;
    }
    return 0;
}

// Reads the file's head into a growing private copy until all metadata is in it, then maps the file. The metadata is
// used from the checked copy only, because another process can change the pages of a mapping.
static int gguf__load(Gguf *g, int fd, size_t size) {
    size_t have = 0;
    g->copies = (uint8_t **)calloc(1, sizeof *g->copies);
    if (!g->copies) return gguf__fail(g, "file", (GgufStr){0}, "E_NOMEM", 0, "out of memory for a file");
    g->n_copies = 1;
    for (size_t want = (size_t)1 << 20;; want *= 2) {
        if (want > size) want = size;
        uint8_t *copy = (uint8_t *)realloc(g->copies[0], want ? want : 1);
        if (!copy)
            return gguf__fail(g, "file", (GgufStr){0}, "E_NOMEM", have, "out of memory for %zu bytes of metadata",
                              want);
        g->copies[0] = copy;
        if (gguf__read(g, fd, copy + have, want - have, have) < 0) return -1;
        have = want;
        int result = gguf__metadata(g, copy, have, size);
        if (result < 0) return result;
        if (result == 0) break;
        gguf__free_tables(g);
        if (want >= GGUF__META_MAX)
            return gguf__fail(g, "file", (GgufStr){0}, "E_STR_LEN", have,
                              "expected at most %zu bytes of metadata, got more", GGUF__META_MAX);
    }
    void *at = gguf__map(g, fd, size);
    if (at) gguf__bind(g, (const uint8_t *)at);
    return at ? 0 : -1;
}

// Opens one file, which may be a part of a split model.
static int gguf__open_file(Gguf *g, const char *path, const char *code) {
    size_t size = 0;
    memset(g, 0, sizeof *g);
    g->path = path;
    int fd = gguf__open_regular(g, path, code, &size);
    if (fd < 0) return -1;
    int failed = gguf__load(g, fd, size);
    close(fd);
    return failed;
}

// ---- reading keys ------------------------------------------------------------------------------------------------

#define GGUF__KV_FAIL(g, kv, code, ...) \
    gguf__fail(g, "key", (kv)->key, code, (size_t)((kv)->data - (g)->meta), __VA_ARGS__)

// Integer i of a scalar or an array.
static int gguf__int_at(Gguf *g, const GgufKv *kv, size_t i, int64_t min, int64_t max, int64_t *out) {
    const uint8_t *p = kv->data + i * gguf__values[kv->elem_type].bytes;
    uint64_t u = 0;
    memcpy(&u, p, gguf__values[kv->elem_type].bytes);
    int64_t v;
    switch (kv->elem_type) {
    case GGUF_V_I8:  v = (int8_t)u; break;
    case GGUF_V_I16: v = (int16_t)u; break;
    case GGUF_V_I32: v = (int32_t)u; break;
    default:         v = (int64_t)u; break;
    }
    bool too_big = kv->elem_type == GGUF_V_U64 && u > INT64_MAX;
    if (too_big || v < min || v > max)
        return gguf__fail(g, "key", kv->key, "E_META_RANGE", (size_t)(p - g->meta),
                          too_big ? "expected an integer in %lld..%lld, got %llu"
                                  : "expected an integer in %lld..%lld, got %lld",
                          (long long)min, (long long)max, (long long)v);
    *out = v;
    return 1;
}

int gguf_get_int(Gguf *g, const char *key, int64_t min, int64_t max, int64_t *out) {
    const GgufKv *kv = gguf_find_kv(g, key);
    if (!kv) return 0;
    if (!gguf__values[kv->type].is_int)
        return GGUF__KV_FAIL(g, kv, "E_META_TYPE", "expected an integer, got %s", gguf__values[kv->type].name);
    return gguf__int_at(g, kv, 0, min, max, out);
}

int gguf_get_float(Gguf *g, const char *key, double *out) {
    const GgufKv *kv = gguf_find_kv(g, key);
    if (!kv) return 0;
    double v;
    if (kv->type == GGUF_V_F32) {
        float f;
        memcpy(&f, kv->data, 4);
        v = f;
    } else if (kv->type == GGUF_V_F64) {
        memcpy(&v, kv->data, 8);
    } else {
        return GGUF__KV_FAIL(g, kv, "E_META_TYPE", "expected f32 or f64, got %s", gguf__values[kv->type].name);
    }
    if (!isfinite(v)) return GGUF__KV_FAIL(g, kv, "E_META_RANGE", "expected a finite number, got %g", v);
    *out = v;
    return 1;
}

int gguf_get_str(Gguf *g, const char *key, GgufStr *out) {
    const GgufKv *kv = gguf_find_kv(g, key);
    if (!kv) return 0;
    if (kv->type != GGUF_V_STR)
        return GGUF__KV_FAIL(g, kv, "E_META_TYPE", "expected a string, got %s", gguf__values[kv->type].name);
    *out = (GgufStr){(const char *)kv->data, (size_t)kv->count};
    return 1;
}

int gguf_get_ints(Gguf *g, const char *key, int64_t min, int64_t max, int64_t *out, size_t n) {
    const GgufKv *kv = gguf_find_kv(g, key);
    if (!kv) return 0;
    bool is_array = kv->type == GGUF_V_ARRAY;
    if (!gguf__values[kv->elem_type].is_int)
        return GGUF__KV_FAIL(g, kv, "E_META_TYPE", "expected integers, got %s%s", is_array ? "an array of " : "",
                             gguf__values[kv->elem_type].name);
    if (is_array && kv->count != n)
        return GGUF__KV_FAIL(g, kv, "E_META_ARRAY", "expected %zu elements, got %llu", n,
                             (unsigned long long)kv->count);
    for (size_t i = 0; i < n; i++)
        if (gguf__int_at(g, kv, is_array ? i : 0, min, max, &out[i]) < 0) return -1;
    return 1;
}

int gguf_get_strs(Gguf *g, const char *key, const GgufStr **out, size_t *n) {
    const GgufKv *kv = gguf_find_kv(g, key);
    if (!kv) return 0;
    if (kv->type != GGUF_V_ARRAY || kv->elem_type != GGUF_V_STR)
        return GGUF__KV_FAIL(g, kv, "E_META_TYPE", "expected an array of strings, got %s%s",
                             kv->type == GGUF_V_ARRAY ? "an array of " : "", gguf__values[kv->elem_type].name);
    *out = kv->strs;
    *n = (size_t)kv->count;
    return 1;
}

// ---- opening -----------------------------------------------------------------------------------------------------
// Each part of a split model is parsed as a separate file; then its tensors are moved to the first part's Gguf.

#define GGUF__SUFFIX 20                     // bytes of "-00001-of-00003.gguf"

typedef struct { int64_t count, no, tensors; } Gguf__Split;         // the split.* keys of a file

static int gguf__split_key(Gguf *g, const char *key, bool is_u16, const char *code, int64_t max, int64_t *out) {
    const GgufKv *kv = gguf_find_kv(g, key);
    if (!kv) return gguf__fail(g, "key", gguf__str(key), code, 24, "missing in one part of a split model");
    if (is_u16 ? kv->type != GGUF_V_U16 : !gguf__values[kv->type].is_int)
        return GGUF__KV_FAIL(g, kv, code, "expected %s, got %s", is_u16 ? "u16" : "an integer",
                             gguf__values[kv->type].name);
    if (gguf__int_at(g, kv, 0, INT64_MIN, INT64_MAX, out) < 0) return -1;
    if (*out < 0 || *out > max)
        return GGUF__KV_FAIL(g, kv, code, "expected 0..%lld, got %lld", (long long)max, (long long)*out);
    return 0;
}

static int gguf__read_split(Gguf *g, Gguf__Split *s) {
    *s = (Gguf__Split){1, 0, 0};
    if (!gguf_find_kv(g, "split.count")) return 0;
    GGUF__TRY(gguf__split_key(g, "split.count", true, "E_SPLIT_COUNT", GGUF__SPLIT_MAX, &s->count));
    if (s->count <= 1) return s->count = 1, 0;
    return gguf__split_key(g, "split.no", true, "E_SPLIT_NO", 65535, &s->no);
}

int gguf_parse(Gguf *g, const void *bytes, size_t size) {
    memset(g, 0, sizeof *g);
    g->path = "(memory)";
    int64_t count = 1;
    int failed = gguf__metadata(g, (const uint8_t *)bytes, size, size);
    const GgufKv *kv = failed ? NULL : gguf_find_kv(g, "split.count");
    if (kv) failed = gguf__split_key(g, "split.count", true, "E_SPLIT_COUNT", GGUF__SPLIT_MAX, &count);
    if (!failed && count > 1)
        failed = GGUF__KV_FAIL(g, kv, "E_SPLIT_COUNT",
                               "expected a whole model, got one of %lld parts; open it by its name",
                               (long long)count);
    if (failed) gguf_close(g);
    else gguf__bind(g, (const uint8_t *)bytes);
    return failed;
}

static void gguf__suffix(char *out, int64_t no, int64_t count) {     // (GGUF__SUFFIX + 1)
    snprintf(out, GGUF__SUFFIX + 1, "-%05u-of-%05u.gguf", (unsigned)(no + 1) % 100000, (unsigned)count % 100000);
}

// Checks that `part` is part i of `count`, then moves its tensors to g, which has room for `total`; and the keys of the
// first part.
static int gguf__join(Gguf *g, Gguf *part, int64_t i, int64_t count, size_t total) {
    Gguf__Split s;
    GGUF__TRY(gguf__split_key(part, "split.count", true, "E_SPLIT_COUNT", 65535, &s.count));
    if (s.count != count)
        return GGUF__KV_FAIL(part, gguf_find_kv(part, "split.count"), "E_SPLIT_COUNT",
                             "expected %lld parts as in the first file, got %lld", (long long)count,
                                 (long long)s.count);
    GGUF__TRY(gguf__split_key(part, "split.no", true, "E_SPLIT_NO", 65535, &s.no));
    if (s.no != i)
        return GGUF__KV_FAIL(part, gguf_find_kv(part, "split.no"), "E_SPLIT_NO",
                             "expected %lld as in the file name, got %lld", (long long)i, (long long)s.no);
    if (part->n_tensors > total - g->n_tensors)
        return gguf__fail(part, "header", (GgufStr){0}, "E_SPLIT_TENSORS", 8,
                          "tensor count: expected at most %zu, the rest of split.tensors.count, got %zu",
                          total - g->n_tensors, part->n_tensors);
    for (size_t k = 0; k < part->n_tensors; k++) {
        const GgufTensor *t = &part->tensors[k];
        size_t slot = gguf__slot(g->tensor_index, g->tensor_slots, g->tensors, sizeof(GgufTensor), t->name);
        if (g->tensor_index[slot])
            return gguf__fail(part, "tensor", t->name, "E_NAME_DUP",
                              (size_t)((const uint8_t *)t->name.s - part->meta) - 8,
                              "expected each name once in all parts, got a duplicate");
        g->tensors[g->n_tensors++] = *t;
        g->tensor_index[slot] = (uint32_t)g->n_tensors;
    }
    g->file_size += part->file_size;
    g->copies[g->n_copies++] = part->copies[0];
    g->maps[g->n_maps++] = part->maps[0];
    part->n_copies = part->n_maps = 0;
    if (i > 0) return 0;
    g->version = part->version;
    g->alignment = part->alignment;
    g->data_start = part->data_start;
    g->meta = part->meta;
    g->kvs = part->kvs;
    g->n_kvs = part->n_kvs;
    g->kv_index = part->kv_index;
    g->kv_slots = part->kv_slots;
    part->kvs = NULL;
    part->kv_index = NULL;
    part->n_kvs = part->kv_slots = 0;
    return 0;
}

// g is an open file. If it is the first part of a split model, opens the other parts and makes g the whole model.
static int gguf__open_parts(Gguf *g) {
    Gguf__Split s;
    char suffix[GGUF__SUFFIX + 1];
    GGUF__TRY(gguf__read_split(g, &s));
    if (s.count == 1) return 0;
    const size_t n = strlen(g->path);
    gguf__suffix(suffix, 0, s.count);
    if (s.no != 0)
        return GGUF__KV_FAIL(g, gguf_find_kv(g, "split.no"), "E_SPLIT_NO",
                             "expected the first part of a split model, got part %lld of %lld; "
                             "open the file that ends in %s",
                             (long long)s.no + 1, (long long)s.count, suffix);
    if (n < GGUF__SUFFIX || strcmp(g->path + n - GGUF__SUFFIX, suffix) != 0)
        return GGUF__KV_FAIL(g, gguf_find_kv(g, "split.count"), "E_SPLIT_NAME",
                             "one of %lld parts: expected a file name that ends in %s, to find the others",
                             (long long)s.count, suffix);
    GGUF__TRY(gguf__split_key(g, "split.tensors.count", false, "E_SPLIT_TENSORS", GGUF__COUNT_MAX, &s.tensors));

    // g becomes empty, with room for all tensors; its own file is the first one to be joined.
    const size_t total = (size_t)s.tensors;
    Gguf part = *g;
    Gguf__Cursor c = {.g = g, .kind = "file"};
    void *tensors = NULL, *maps = calloc((size_t)s.count, sizeof *g->maps);
    char *name = (char *)malloc(n + 1);
    memset(g, 0, sizeof *g);
    g->path = part.path;
    g->copies = (uint8_t **)calloc((size_t)s.count, sizeof *g->copies);
    g->maps = maps;
    int failed = gguf__tables(&c, total, sizeof(GgufTensor), &tensors, &g->tensor_index, &g->tensor_slots);
    g->tensors = (GgufTensor *)tensors;
    if (!failed && (!name || !g->copies || !g->maps))
        failed = gguf__fail(g, "file", (GgufStr){0}, "E_NOMEM", 0, "out of memory for %lld parts", (long long)s.count);
    if (name) memcpy(name, g->path, n + 1);
    for (int64_t i = 0; i < s.count && !failed; i++) {
        if (i > 0) {
            gguf__suffix(name + n - GGUF__SUFFIX, i, s.count);
            failed = gguf__open_file(&part, name, "E_SPLIT_MISSING");
        }
        if (!failed) failed = gguf__join(g, &part, i, s.count, total);
        const char *slash = strrchr(name, '/'), *file = slash ? slash + 1 : name;
        if (failed) snprintf(g->err, sizeof g->err, "%.255s%s%.700s", i ? file : "", i ? ": " : "", part.err);
        gguf_close(&part);
    }
    gguf_close(&part);
    free(name);
    if (!failed && g->n_tensors != total)
        failed = GGUF__KV_FAIL(g, gguf_find_kv(g, "split.tensors.count"), "E_SPLIT_TENSORS",
                               "expected %zu, the tensors in all parts, got %zu", g->n_tensors, total);
    return failed;
}

int gguf_open(Gguf *g, const char *path) {
    int failed = gguf__open_file(g, path, "E_OPEN");
    if (!failed) failed = gguf__open_parts(g);
    if (failed) gguf_close(g);
    return failed;
}

// ---- checking tensor data ----------------------------------------------------------------------------------------

// Offsets of the f16 scales in a block; -1: none. Floats and the FP4 formats have their own checks.
static const int16_t gguf__scale_at[GGUF_N_TYPES][2] = {
    [GGUF_Q4_0]   = {0, -1},  [GGUF_Q4_1]   = {0, 2},   [GGUF_Q5_0]    = {0, -1},   [GGUF_Q5_1]    = {0, 2},
    [GGUF_Q8_0]   = {0, -1},  [GGUF_Q8_1]   = {0, 2},   [GGUF_Q2_K]    = {80, 82},  [GGUF_Q3_K]    = {108, -1},
    [GGUF_Q4_K]   = {0, 2},   [GGUF_Q5_K]   = {0, 2},   [GGUF_Q6_K]    = {208, -1}, [GGUF_IQ2_XXS] = {0, -1},
    [GGUF_IQ2_XS] = {0, -1},  [GGUF_IQ2_S]  = {0, -1},  [GGUF_IQ3_XXS] = {0, -1},   [GGUF_IQ3_S]   = {0, -1},
    [GGUF_IQ1_S]  = {0, -1},  [GGUF_IQ4_NL] = {0, -1},  [GGUF_IQ4_XS]  = {0, -1},   [GGUF_TQ1_0]   = {52, -1},
    [GGUF_TQ2_0]  = {64, -1}, [GGUF_Q1_0]   = {0, -1},  [GGUF_Q2_0]    = {0, -1},
};

// True: the block has no NaN, Inf or reserved value.
static inline bool gguf__block_good(int type, const uint8_t *b) {
    uint64_t u64;
    uint32_t u32;
    uint16_t u16;
    switch (type) {
    case GGUF_F64: memcpy(&u64, b, 8); return (u64 & 0x7ff0000000000000u) != 0x7ff0000000000000u;
    case GGUF_F32:
    case GGUF_Q8_K: memcpy(&u32, b, 4); return (u32 & 0x7f800000) != 0x7f800000;
    case GGUF_F16: memcpy(&u16, b, 2); return (u16 & 0x7c00) != 0x7c00;
    case GGUF_BF16: memcpy(&u16, b, 2); return (u16 & 0x7f80) != 0x7f80;
    case GGUF_MXFP4: return b[0] != 0xff;
    case GGUF_NVFP4: memcpy(&u32, b, 4); return (u32 & 0x80808080) == 0;
    case GGUF_I8: case GGUF_I16: case GGUF_I32: case GGUF_I64: case GGUF_IQ1_M: return true;
    default:
        for (int k = 0; k < 2 && gguf__scale_at[type][k] >= 0; k++) {
            memcpy(&u16, b + gguf__scale_at[type][k], 2);
            if ((u16 & 0x7c00) == 0x7c00) return false;
        }
        return true;
    }
}

// The same for 256 elements of F32, F16 or BF16 at once. The loop has no early exit, so that the compiler vectorises
// it.
static inline bool gguf__floats_good(int type, const uint8_t *b) {
    uint32_t u32[256], bad = 0;
    uint16_t u16[256], mask = type == GGUF_F16 ? 0x7c00 : 0x7f80;
    if (type == GGUF_F32) {
        memcpy(u32, b, sizeof u32);
        for (int i = 0; i < 256; i++) bad |= (u32[i] & 0x7f800000) == 0x7f800000;
    } else {
        memcpy(u16, b, sizeof u16);
        for (int i = 0; i < 256; i++) bad |= (u16[i] & mask) == mask;
    }
    return !bad;
}

size_t gguf_find_bad_block(int type, const void *blocks, size_t n) {
    const uint8_t *b = (const uint8_t *)blocks;
    const size_t bytes = (size_t)gguf_block_bytes(type);
    const bool is_float = type == GGUF_F32 || type == GGUF_F16 || type == GGUF_BF16;
    size_t i = 0;
    if (!gguf__type_known(type)) return n;
    while (is_float && n - i >= 256 && gguf__floats_good(type, b + i * bytes)) i += 256;
    while (i < n && gguf__block_good(type, b + i * bytes)) i++;
    return i;
}

// ---- writing a file's head ---------------------------------------------------------------------------------------

static void gguf__put(GgufWriter *w, uint8_t **to, size_t *size, size_t *cap, const void *bytes, size_t n) {
    if (n > *cap - *size) {
        size_t want = 2 * (*cap + n);
        uint8_t *grown = w->no_memory ? NULL : (uint8_t *)realloc(*to, want);
        if (!grown) {
            w->no_memory = true;
            return;
        }
        *to = grown;
        *cap = want;
    }
    if (n > 0) memcpy(*to + *size, bytes, n);
    *size += n;
}

static void gguf__put_kv_bytes(GgufWriter *w, const void *bytes, size_t n) {
    gguf__put(w, &w->kvs, &w->kvs_size, &w->kvs_cap, bytes, n);
}
static void gguf__put_kv_u32(GgufWriter *w, uint32_t v) { gguf__put_kv_bytes(w, &v, 4); }
static void gguf__put_kv_str(GgufWriter *w, GgufStr s) {
    const uint64_t n = s.n;
    gguf__put_kv_bytes(w, &n, 8);
    gguf__put_kv_bytes(w, s.s, s.n);
}

void gguf_put_kv(GgufWriter *w, const GgufKv *kv) {
    static const char alignment[] = "general.alignment";
    if (kv->key.n == sizeof alignment - 1 && memcmp(kv->key.s, alignment, kv->key.n) == 0) return;
    gguf__put_kv_str(w, kv->key);
    gguf__put_kv_u32(w, (uint32_t)kv->type);
    if (kv->type == GGUF_V_STR) {
        gguf__put_kv_str(w, (GgufStr){(const char *)kv->data, (size_t)kv->count});
    } else {
        if (kv->type == GGUF_V_ARRAY) {
            gguf__put_kv_u32(w, (uint32_t)kv->elem_type);
            gguf__put_kv_bytes(w, &kv->count, 8);
        }
        if (kv->elem_type == GGUF_V_STR) for (size_t i = 0; i < kv->count; i++) gguf__put_kv_str(w, kv->strs[i]);
        else gguf__put_kv_bytes(w, kv->data, (size_t)kv->count * gguf__values[kv->elem_type].bytes);
    }
    w->n_kvs++;
}

static void gguf__put_scalar(GgufWriter *w, const char *key, int type, const void *v) {
    gguf_put_kv(w, &(GgufKv){.key = gguf__str(key), .type = type, .elem_type = type, .count = 1,
                             .data = (const uint8_t *)v});
}
void gguf_put_u32(GgufWriter *w, const char *key, uint32_t v) { gguf__put_scalar(w, key, GGUF_V_U32, &v); }
void gguf_put_f32(GgufWriter *w, const char *key, float v) { gguf__put_scalar(w, key, GGUF_V_F32, &v); }
void gguf_put_bool(GgufWriter *w, const char *key, bool v) { gguf__put_scalar(w, key, GGUF_V_BOOL, &(uint8_t){v}); }

void gguf_put_str(GgufWriter *w, const char *key, GgufStr v) {
    gguf_put_kv(w, &(GgufKv){.key = gguf__str(key), .type = GGUF_V_STR, .elem_type = GGUF_V_STR, .count = v.n,
                             .data = (const uint8_t *)v.s});
}

void gguf_put_array(GgufWriter *w, const char *key, int elem_type, const void *v, size_t n) {
    const bool strs = elem_type == GGUF_V_STR;
    gguf_put_kv(w, &(GgufKv){.key = gguf__str(key), .type = GGUF_V_ARRAY, .elem_type = elem_type, .count = n,
                             .data = strs ? NULL : (const uint8_t *)v, .strs = strs ? (GgufStr *)(uintptr_t)v : NULL});
}

void gguf_put_tensor(GgufWriter *w, GgufStr name, int type, int n_dims, const uint64_t *ne) {
    const uint64_t n = name.n;
    const uint32_t head[2] = {(uint32_t)n_dims, (uint32_t)type};
    uint64_t size = gguf_row_size(type, (size_t)ne[0]);
    for (int d = 1; d < n_dims; d++) size *= ne[d];
    gguf__put(w, &w->infos, &w->infos_size, &w->infos_cap, &n, 8);
    gguf__put(w, &w->infos, &w->infos_size, &w->infos_cap, name.s, name.n);
    gguf__put(w, &w->infos, &w->infos_size, &w->infos_cap, &head[0], 4);
    gguf__put(w, &w->infos, &w->infos_size, &w->infos_cap, ne, 8 * (size_t)n_dims);
    gguf__put(w, &w->infos, &w->infos_size, &w->infos_cap, &head[1], 4);
    gguf__put(w, &w->infos, &w->infos_size, &w->infos_cap, &w->data_size, 8);
    w->data_size += size + gguf__pad(size, 32);
    w->n_tensors++;
}

uint8_t *gguf_writer_head(const GgufWriter *w, size_t *size) {
    const size_t used = 24 + w->kvs_size + w->infos_size;
    const uint32_t version = 3;
    *size = used + (size_t)gguf__pad(used, 32);
    uint8_t *head = w->no_memory ? NULL : (uint8_t *)calloc(*size, 1);
    if (!head) return NULL;
    memcpy(head, "GGUF", 4);
    memcpy(head + 4, &version, 4);
    memcpy(head + 8, &w->n_tensors, 8);
    memcpy(head + 16, &w->n_kvs, 8);
    if (w->kvs_size) memcpy(head + 24, w->kvs, w->kvs_size);
    if (w->infos_size) memcpy(head + 24 + w->kvs_size, w->infos, w->infos_size);
    return head;
}

void gguf_writer_free(GgufWriter *w) {
    free(w->kvs);
    free(w->infos);
    memset(w, 0, sizeof *w);
}

int gguf_from_writer(Gguf *g, const GgufWriter *w, const uint8_t *const *data, Gguf *from) {
    size_t size;
    memset(g, 0, sizeof *g);
    g->path = from->path;
    g->maps = from->maps;
    g->n_maps = from->n_maps;
    from->maps = NULL;
    from->n_maps = 0;
    gguf_close(from);
    g->copies = (uint8_t **)calloc(1, sizeof *g->copies);
    uint8_t *head = g->copies ? gguf_writer_head(w, &size) : NULL;
    int failed = head ? 0 : gguf__fail(g, "file", (GgufStr){0}, "E_NOMEM", 0, "out of memory for the keys of a model");
    if (head) g->copies[g->n_copies++] = head;
    if (head) failed = gguf__metadata(g, head, size, size + (size_t)w->data_size);
    if (failed) gguf_close(g);
    else for (size_t i = 0; i < g->n_tensors; i++) g->tensors[i].data = data[i];
    g->converted = true;
    return failed;
}

// ---- JSON --------------------------------------------------------------------------------------------------------

enum { GGUF__JSON_DEPTH = 256 };

static size_t gguf__json_space(const char *s, size_t i, size_t n) {
    while (i < n && (s[i] == ' ' || s[i] == '\n' || s[i] == '\r' || s[i] == '\t')) i++;
    return i;
}

static bool gguf__json_digit(const char *s, size_t i, size_t n) { return i < n && s[i] >= '0' && s[i] <= '9'; }

static int gguf__hex(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

// Returns the end of the string or scalar that starts at i. On an error, *err says what was expected at the result.
static size_t gguf__json_scalar(const char *s, size_t i, size_t n, int *type, const char **err) {
    *err = NULL;
    if (s[i] == '"') {
        *type = GGUF_J_STRING;
        for (i++; i < n && s[i] != '"'; i++) {
            if ((unsigned char)s[i] < 0x20) return *err = "a control character as an escape", i;
            if (s[i] != '\\') continue;
            if (++i < n && s[i] == 'u') {
                for (int k = 0; k < 4; k++)
                    if (++i >= n || gguf__hex(s[i]) < 0) return *err = "four hexadecimal digits", i;
            } else if (i >= n || !s[i] || !strchr("\"\\/bfnrt", s[i])) {
                return *err = "an escape", i;
            }
        }
        if (i >= n) *err = "the end of the string";
        return i + 1;
    }
    static const char *const words[3] = {"null", "false", "true"};
    for (int k = 0; k < 3; k++) {
        const size_t len = strlen(words[k]);
        if (s[i] != words[k][0]) continue;
        if (n - i < len || memcmp(s + i, words[k], len) != 0) return *err = words[k], i;
        *type = GGUF_J_NULL + k;
        return i + len;
    }
    *type = GGUF_J_NUMBER;
    if (s[i] == '-') i++;
    if (!gguf__json_digit(s, i, n)) return *err = "a value", i;
    const bool zero = s[i] == '0';
    while (gguf__json_digit(s, ++i, n))
        if (zero) return *err = "no digit after a leading zero", i;
    if (i < n && s[i] == '.') {
        if (!gguf__json_digit(s, ++i, n)) return *err = "a digit", i;
        while (gguf__json_digit(s, i, n)) i++;
    }
    if (i < n && (s[i] == 'e' || s[i] == 'E')) {
        i++;
        if (i < n && (s[i] == '+' || s[i] == '-')) i++;
        if (!gguf__json_digit(s, i, n)) return *err = "a digit", i;
        while (gguf__json_digit(s, i, n)) i++;
    }
    return i;
}

// Checks the value that starts at i. Returns its end; on an error, *err says what was expected at the result.
static size_t gguf__json_value_end(const char *text, size_t i, size_t n, const char **err) {
    char open[GGUF__JSON_DEPTH];                // '[' or '{' of each level
    int depth = 0, type;
    bool want_key = false, may_close = false;   // want_key: in an object, before a key; may_close: after '[' or '{'
    for (;;) {
        i = gguf__json_space(text, i, n);
        if (i >= n) { *err = depth ? "the end of an array or object" : "a value"; break; }
        if (may_close && text[i] == (open[depth - 1] == '[' ? ']' : '}')) {
            i++;
            depth--;
        } else if (want_key) {
            if (text[i] != '"') { *err = "a key"; break; }
            i = gguf__json_scalar(text, i, n, &type, err);
            if (*err) break;
            i = gguf__json_space(text, i, n);
            if (i >= n || text[i] != ':') { *err = "a colon"; break; }
            i++;
            want_key = may_close = false;
            continue;
        } else if (text[i] == '[' || text[i] == '{') {
            if (depth == GGUF__JSON_DEPTH) { *err = "at most 256 levels"; break; }
            open[depth++] = text[i++];
            want_key = open[depth - 1] == '{';
            may_close = true;
            continue;
        } else {
            i = gguf__json_scalar(text, i, n, &type, err);
            if (*err) break;
        }
        // A value is complete: close the containers that end here, then continue after a comma.
        for (;;) {
            if (depth == 0) break;
            i = gguf__json_space(text, i, n);
            if (i >= n || text[i] != (open[depth - 1] == '[' ? ']' : '}')) break;
            i++;
            depth--;
        }
        if (depth == 0) break;
        if (i >= n || text[i] != ',') { *err = open[depth - 1] == '[' ? "',' or ']'" : "',' or '}'"; break; }
        i++;
        want_key = open[depth - 1] == '{';
        may_close = false;
    }
    return i;
}

int gguf_json_parse(const char *text, size_t n, GgufJson *value, size_t *err_at, const char **err) {
    *err = NULL;
    const size_t start = gguf__json_space(text, 0, n), end = gguf__json_value_end(text, start, n, err);
    size_t i = end;
    if (!*err) {
        i = gguf__json_space(text, end, n);
        if (i == n) {
            const char c = text[start];
            value->type = c == '{' ? GGUF_J_OBJECT : c == '[' ? GGUF_J_ARRAY : GGUF_J_NULL;
            if (value->type == GGUF_J_NULL) gguf__json_scalar(text, start, n, &value->type, err);
            value->s = text + start;
            value->n = end - start;
            return 0;
        }
        *err = "nothing after the value";
    }
    *err_at = i < n ? i : n;
    return -1;
}

// The value that starts at s, in a checked text that ends at s + n.
static GgufJson gguf__json_value(const char *s, size_t n) {
    GgufJson v = {*s == '{' ? GGUF_J_OBJECT : GGUF_J_ARRAY, s, 0};
    const char *err;
    if (*s != '{' && *s != '[') {
        v.n = gguf__json_scalar(s, 0, n, &v.type, &err);
        return v;
    }
    int depth = 0;
    do {
        const char c = s[v.n++];
        if (c == '{' || c == '[') depth++;
        else if (c == '}' || c == ']') depth--;
        else if (c == '"')
            for (; s[v.n++] != '"'; ) v.n += s[v.n - 1] == '\\';
    } while (depth > 0);
    return v;
}

bool gguf_json_next(GgufJson *rest, GgufJson *key, GgufJson *value) {
    size_t i = gguf__json_space(rest->s, 1, rest->n);               // after the bracket or comma
    if (i >= rest->n || rest->s[i] == ']' || rest->s[i] == '}') return false;
    if (rest->type == GGUF_J_OBJECT) {
        const GgufJson name = gguf__json_value(rest->s + i, rest->n - i);
        if (key) *key = name;
        i = gguf__json_space(rest->s, i + name.n, rest->n) + 1;
        i = gguf__json_space(rest->s, i, rest->n);
    }
    *value = gguf__json_value(rest->s + i, rest->n - i);
    i = gguf__json_space(rest->s, i + value->n, rest->n);
    rest->s += i;
    rest->n -= i;
    return true;
}

bool gguf_json_get(const GgufJson *object, const char *key, GgufJson *out) {
    GgufJson rest = *object, name, value;
    bool found = false;
    *out = (GgufJson){ .type = GGUF_J_NULL, .s = "null", .n = 4 };
    while (rest.type == GGUF_J_OBJECT && gguf_json_next(&rest, &name, &value))
        if (gguf_json_is(&name, key)) *out = value, found = true;
    return found;
}

size_t gguf_utf8(uint32_t c, char out[4]) {
    if (c < 0x80) return out[0] = (char)c, 1;
    const int more = c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
    static const unsigned char lead[4] = {0, 0xc0, 0xe0, 0xf0};
    out[0] = (char)(lead[more] | c >> (6 * more));
    for (int k = 1; k <= more; k++) out[k] = (char)(0x80 | (c >> (6 * (more - k)) & 63));
    return (size_t)more + 1;
}

// Decodes one character at s, inside the quotes of a string, to out (4 bytes). *used: the number of bytes read.
static size_t gguf__json_char(const char *s, size_t n, char *out, size_t *used) {
    *used = 1;
    if (s[0] != '\\') return out[0] = s[0], 1;
    *used = 2;
    if (s[1] != 'u') {
        static const char from[] = "bfnrt", to[] = "\b\f\n\r\t";
        const char *at = strchr(from, s[1]);
        return out[0] = at ? to[at - from] : s[1], 1;
    }
    uint32_t c = 0, low = 0;
    *used = 6;
    for (int k = 2; k < 6; k++) c = c << 4 | (uint32_t)gguf__hex(s[k]);
    if (c >= 0xd800 && c < 0xdc00 && n >= 12 && s[6] == '\\' && s[7] == 'u') {
        for (int k = 8; k < 12; k++) low = low << 4 | (uint32_t)gguf__hex(s[k]);
        if (low >= 0xdc00 && low < 0xe000) {
            *used = 12;
            return gguf_utf8(0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00), out);
        }
    }
    return gguf_utf8(c >= 0xd800 && c < 0xe000 ? 0xfffd : c, out);
}

size_t gguf_json_string(const GgufJson *string, char *out) {
    size_t n = 0, used;
    for (size_t i = 1; i + 1 < string->n; i += used)
        n += gguf__json_char(string->s + i, string->n - 1 - i, out + n, &used);
    return n;
}

bool gguf_json_is(const GgufJson *string, const char *text) {
    char c[4];
    size_t used;
    if (string->type != GGUF_J_STRING) return false;
    for (size_t i = 1; i + 1 < string->n; i += used) {
        const size_t n = gguf__json_char(string->s + i, string->n - 1 - i, c, &used);
        if (strncmp(text, c, n) != 0 || memchr(c, 0, n)) return false;
        text += n;
    }
    return *text == 0;
}

bool gguf_json_float(const GgufJson *number, double *out) {
    char text[64];
    if (number->type != GGUF_J_NUMBER || number->n >= sizeof text) return false;
    memcpy(text, number->s, number->n);
    text[number->n] = 0;
    *out = strtod(text, NULL);
    return isfinite(*out);
}

bool gguf_json_int(const GgufJson *number, int64_t min, int64_t max, int64_t *out) {
    char text[64];
    if (number->type != GGUF_J_NUMBER || number->n >= sizeof text) return false;
    memcpy(text, number->s, number->n);
    text[number->n] = 0;
    char *end;
    errno = 0;
    const long long v = strtoll(text, &end, 10);
    if (*end || errno || v < min || v > max) return false;
    *out = v;
    return true;
}

// ---- safetensors -------------------------------------------------------------------------------------------------

#define GGUF__ST_HEADER_MAX ((uint64_t)100000000)       // bytes, the format's own limit
#define GGUF__ST_FILES_MAX  1024

static const struct {
    const char *name;
    int type, bits;                         // type -1: no tensor type of GGUF
} gguf__dtypes[] = {
    {"F32", GGUF_F32, 32}, {"F16", GGUF_F16, 16}, {"BF16", GGUF_BF16, 16}, {"F64", GGUF_F64, 64}, {"I8", GGUF_I8, 8},
    {"I16", GGUF_I16, 16}, {"I32", GGUF_I32, 32}, {"I64", GGUF_I64, 64}, {"BOOL", -1, 8}, {"U8", -1, 8},
    {"U16", -1, 16},
    {"U32", -1, 32}, {"U64", -1, 64}, {"C64", -1, 64}, {"F8_E4M3", -1, 8}, {"F8_E5M2", -1, 8}, {"F8_E8M0", -1, 8},
    {"F8_E4M3FNUZ", -1, 8}, {"F8_E5M2FNUZ", -1, 8}, {"F6_E2M3", -1, 6}, {"F6_E3M2", -1, 6}, {"F4", -1, 4},
};

typedef struct {                            // one file while its header is read
    Gguf *g;
    const char *header;                     // the private copy of the JSON, which starts at byte 8 of the file
    GgufStr name;                           // of the current tensor
    uint64_t data_size;
} Gguf__St;

#define GGUF__ST_FAIL(f, code, at, ...) \
    gguf__fail((f)->g, (f)->name.n ? "tensor" : "header", (f)->name, code, 8 + (size_t)((at) - (f)->header), \
               __VA_ARGS__)

// Reads one member of the header into a tensor, without its data.
static int gguf__st_tensor(Gguf__St *f, const GgufJson *entry, GgufTensor *t) {
    GgufJson dtype, shape, offsets, v;
    if (entry->type != GGUF_J_OBJECT) return GGUF__ST_FAIL(f, "E_ST_FIELD", entry->s, "expected an object");
    if (!gguf_json_get(entry, "dtype", &dtype) || dtype.type != GGUF_J_STRING)
        return GGUF__ST_FAIL(f, "E_ST_FIELD", entry->s, "dtype: expected a string");
    if (!gguf_json_get(entry, "shape", &shape) || shape.type != GGUF_J_ARRAY)
        return GGUF__ST_FAIL(f, "E_ST_FIELD", entry->s, "shape: expected an array");
    if (!gguf_json_get(entry, "data_offsets", &offsets) || offsets.type != GGUF_J_ARRAY)
        return GGUF__ST_FAIL(f, "E_ST_FIELD", entry->s, "data_offsets: expected an array");
    size_t d = 0;
    while (d < sizeof gguf__dtypes / sizeof *gguf__dtypes && !gguf_json_is(&dtype, gguf__dtypes[d].name)) d++;
    if (d == sizeof gguf__dtypes / sizeof *gguf__dtypes)
        return GGUF__ST_FAIL(f, "E_DTYPE", dtype.s, "dtype: expected a known type, such as \"BF16\"");
    t->type = gguf__dtypes[d].type;

    // The file has the slowest dimension first: dimension i of n goes to ne[n - 1 - i]. No dtype has more than two
    // elements per byte, which bounds the products of dimensions, so they do not wrap.
    const uint64_t limit = 2 * f->data_size + 1;
    uint64_t n = 1;
    bool empty = false;
    size_t n_dims = 0, i = 0;
    for (GgufJson rest = shape; gguf_json_next(&rest, NULL, &v); n_dims++) {
        int64_t ne;
        if (!gguf_json_int(&v, 0, INT64_MAX, &ne))
            return GGUF__ST_FAIL(f, "E_DIM", v.s, "shape: expected integers");
        if (ne == 0) empty = true;
        else if ((uint64_t)ne > limit / n)
            return GGUF__ST_FAIL(f, "E_NELEM", v.s,
                                 "shape: expected at most %llu here for a file of this size, got %lld",
                                 (unsigned long long)(limit / n), (long long)ne);
        else n *= (uint64_t)ne;
    }
    for (int k = 0; k < 4; k++) t->ne[k] = 1;
    t->n_dims = n_dims < 4 ? (int)n_dims : 4;
    for (GgufJson rest = shape; gguf_json_next(&rest, NULL, &v); i++) {
        int64_t ne = 0;
        gguf_json_int(&v, 0, INT64_MAX, &ne);
        const size_t at = n_dims - 1 - i;
        if (at < 4) t->ne[at] *= (uint64_t)ne;
        else t->ne[3] *= (uint64_t)ne;
    }

    int64_t span[2];
    GgufJson rest = offsets;
    for (i = 0; i < 2; i++)
        if (!gguf_json_next(&rest, NULL, &v) || !gguf_json_int(&v, 0, INT64_MAX, &span[i]))
            return GGUF__ST_FAIL(f, "E_ST_FIELD", offsets.s, "data_offsets: expected two integers");
    if (gguf_json_next(&rest, NULL, &v))
        return GGUF__ST_FAIL(f, "E_ST_FIELD", v.s, "data_offsets: expected no third number");
    if (span[0] > span[1] || (uint64_t)span[1] > f->data_size)
        return GGUF__ST_FAIL(f, "E_OFF_RANGE", offsets.s,
                             "data_offsets: expected begin <= end <= %llu, got %lld and %lld",
                             (unsigned long long)f->data_size, (long long)span[0], (long long)span[1]);
    t->offset = (uint64_t)span[0];
    t->size = (uint64_t)(span[1] - span[0]);
    if (empty) n = 0;
    const uint64_t bits = (uint64_t)gguf__dtypes[d].bits;               // n <= 2^64 / 64 in any file that can be mapped
    if (n > UINT64_MAX / bits || n * bits % 8 != 0 || n * bits / 8 != t->size)
        return GGUF__ST_FAIL(f, "E_NBYTES", offsets.s,
                             "data_offsets: expected %llu elements of %d bits, got %llu bytes",
                             (unsigned long long)n, (int)bits, (unsigned long long)t->size);
    return 0;
}

static int gguf__st_order(const void *a, const void *b) {
    const GgufTensor *x = *(const GgufTensor *const *)a, *y = *(const GgufTensor *const *)b;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    return x->size != y->size ? (x->size < y->size ? -1 : 1) : 0;
}

// Checks that the offsets, when sorted, are the running sum of the sizes and end at the end of the data. sorted: (n)
// scratch.
static int gguf__st_cover(Gguf__St *f, GgufTensor *tensors, size_t n, const GgufTensor **sorted) {
    uint64_t expect = 0;
    for (size_t i = 0; i < n; i++) sorted[i] = &tensors[i];
    if (n > 0) qsort(sorted, n, sizeof *sorted, gguf__st_order);
    for (size_t i = 0; i < n; i++) {
        f->name = sorted[i]->name;
        if (sorted[i]->offset != expect)
            return GGUF__ST_FAIL(f, "E_OFF_SEQ", sorted[i]->name.s,
                                 "expected data at %llu, right after the previous tensor, got %llu",
                                 (unsigned long long)expect, (unsigned long long)sorted[i]->offset);
        expect += sorted[i]->size;
    }
    f->name = (GgufStr){0};
    if (expect != f->data_size)
        return GGUF__ST_FAIL(f, "E_OFF_SEQ", f->header, "expected tensors that cover %llu bytes of data, got %llu",
                             (unsigned long long)f->data_size, (unsigned long long)expect);
    return 0;
}

// Makes room for n tensors in their array and in the hash table. The table at least doubles when it grows, so that a
// set of files costs no more than one file with all their tensors.
static bool gguf__st_room(Gguf *g, size_t n) {
    size_t slots = g->tensor_slots ? g->tensor_slots : 4;
    while (slots < 2 * n + 4) slots *= 2;
    if (slots == g->tensor_slots) return true;
    GgufTensor *tensors = (GgufTensor *)realloc(g->tensors, slots / 2 * sizeof *tensors);
    uint32_t *index = (uint32_t *)calloc(slots, sizeof *index);
    if (tensors) g->tensors = tensors;
    if (!tensors || !index) {
        free(index);
        return false;
    }
    free(g->tensor_index);
    g->tensor_index = index;
    g->tensor_slots = slots;
    for (size_t i = 0; i < g->n_tensors; i++) *gguf__tensor_slot(g, tensors[i].name) = (uint32_t)i + 1;
    return true;
}

// Appends the tensors of one file of `size` bytes. header: (n) the private copy of its JSON.
static int gguf__st_add(Gguf *g, const uint8_t *bytes, size_t size, const char *header, size_t n) {
    Gguf__St f = {g, header, {0}, size - 8 - n};
    GgufJson root, rest, key, value;
    size_t at, count = 0;
    const char *err;
    if (n == 0 || header[0] != '{') return GGUF__ST_FAIL(&f, "E_JSON", header, "expected JSON that starts with {");
    if (gguf_json_parse(header, n, &root, &at, &err) < 0)
        return GGUF__ST_FAIL(&f, "E_JSON", header + at, "expected %s", err);
    for (rest = root; gguf_json_next(&rest, &key, &value); ) count++;
    if (count > GGUF__COUNT_MAX || g->n_tensors > GGUF__COUNT_MAX)
        return GGUF__ST_FAIL(&f, "E_NTENSORS", header, "expected at most %d tensors, got %zu", GGUF__COUNT_MAX, count);

    const size_t first = g->n_tensors;
    const GgufTensor **sorted = (const GgufTensor **)calloc(count + 1, sizeof *sorted);
    int failed = 0;
    if (!sorted || !gguf__st_room(g, first + count))
        failed = GGUF__ST_FAIL(&f, "E_NOMEM", header, "out of memory for %zu tensors", count);
    for (rest = root; !failed && gguf_json_next(&rest, &key, &value); ) {
        if (gguf_json_is(&key, "__metadata__")) continue;
        GgufTensor *t = memset(&g->tensors[g->n_tensors], 0, sizeof *t);
        f.name = t->name = (GgufStr){key.s + 1, key.n - 2};
        if (t->name.n < 1 || t->name.n > 255)
            failed = GGUF__ST_FAIL(&f, "E_NAME_LEN", key.s, "expected a name of 1..255 bytes, got %zu", t->name.n);
        for (size_t i = 0; i < t->name.n && !failed; i++) {
            const unsigned char ch = (unsigned char)t->name.s[i];
            if (ch < 0x21 || ch > 0x7e || ch == '\\')
                failed = GGUF__ST_FAIL(&f, "E_NAME_CHAR", key.s,
                                       "expected bytes 0x21..0x7e without escapes, got 0x%02x", ch);
        }
        if (failed) break;
        uint32_t *slot = gguf__tensor_slot(g, t->name);
        if (*slot) {
            failed = GGUF__ST_FAIL(&f, "E_NAME_DUP", key.s, "expected each name once, got a duplicate");
            break;
        }
        failed = gguf__st_tensor(&f, &value, t);
        if (failed) break;
        t->data = bytes + 8 + n + (size_t)t->offset;
        *slot = (uint32_t)++g->n_tensors;
    }
    if (!failed) failed = gguf__st_cover(&f, g->tensors + first, g->n_tensors - first, sorted);
    free(sorted);
    return failed;
}

// The length of a file's header, checked against the size of the file.
static int gguf__st_header(Gguf *g, const uint8_t *first8, size_t size, size_t *n) {
    uint64_t v = 0;
    if (size < 8)
        return gguf__fail(g, "header", (GgufStr){0}, "E_TRUNC", 0, "expected 8 bytes of length, got %zu", size);
    memcpy(&v, first8, 8);
    if (v > GGUF__ST_HEADER_MAX)
        return gguf__fail(g, "header", (GgufStr){0}, "E_ST_HEADER", 0, "expected at most %llu bytes of JSON, got %llu",
                          (unsigned long long)GGUF__ST_HEADER_MAX, (unsigned long long)v);
    if (v > size - 8)
        return gguf__fail(g, "header", (GgufStr){0}, "E_TRUNC", 0, "expected %llu bytes of JSON, got %zu in the file",
                          (unsigned long long)v, size - 8);
    *n = (size_t)v;
    return 0;
}

int gguf_parse_safetensors(Gguf *g, const void *bytes, size_t size) {
    const uint8_t *b = (const uint8_t *)bytes;
    size_t n = 0;
    memset(g, 0, sizeof *g);
    g->path = "(memory)";
    g->file_size = size;
    int failed = gguf__st_header(g, b, size, &n);
    if (!failed) failed = gguf__st_add(g, b, size, (const char *)b + 8, n);
    if (failed) gguf_close(g);
    return failed;
}

static int gguf__st_file(Gguf *g, const char *path) {
    uint8_t first8[8] = {0};
    size_t n = 0, size = 0;
    int fd = gguf__open_regular(g, path, "E_OPEN", &size);
    if (fd < 0) return -1;
    int failed = size >= 8 ? gguf__read(g, fd, first8, 8, 0) : 0;
    if (!failed) failed = gguf__st_header(g, first8, size, &n);
    char *header = failed ? NULL : (char *)gguf_private(g, n);
    uint8_t *at = header && gguf__read(g, fd, header, n, 8) == 0 ? (uint8_t *)gguf__map(g, fd, size) : NULL;
    close(fd);
    if (!at) return -1;
    g->file_size += size;
    return gguf__st_add(g, at, size, header, n);
}

// Opens one more file of a set: `name`, in the folder of `path`.
static int gguf__st_part(Gguf *g, const char *path, GgufStr name) {
    char full[4096], shown[GGUF__SHOWN_MAX], why[sizeof g->err];
    const char *slash = strrchr(path, '/');
    const int dir = slash ? (int)(slash - path) + 1 : 0;
    if ((size_t)snprintf(full, sizeof full, "%.*s%.*s", dir, path, (int)name.n, name.s) >= sizeof full)
        return gguf__fail(g, "file", (GgufStr){0}, "E_SPLIT_NAME", 0, "expected a shorter path");
    if (gguf__st_file(g, full) == 0) return 0;
    memcpy(why, g->err, sizeof why);
    snprintf(g->err, sizeof g->err, "%s: %.700s", gguf__shown(name, shown), why);
    return -1;
}

// Opens each file that an index names, once, then checks that all tensors of the index are there.
static int gguf__st_index(Gguf *g, const char *path) {
    Gguf text = {0};                                    // only its mapping is used
    size_t size = 0;
    int fd = gguf__open_regular(g, path, "E_OPEN", &size);
    if (fd < 0) return -1;
    int failed = size <= GGUF__ST_HEADER_MAX ? 0
               : gguf__fail(g, "index", (GgufStr){0}, "E_ST_HEADER", 0, "expected at most %llu bytes of JSON, got %zu",
                            (unsigned long long)GGUF__ST_HEADER_MAX, size);
    char *json = failed ? NULL : (char *)gguf_private(&text, size);
    if (!failed && !json)
        failed = gguf__fail(g, "index", (GgufStr){0}, "E_NOMEM", 0, "out of memory for %zu bytes", size);
    if (!failed) failed = gguf__read(g, fd, json, size, 0);
    close(fd);
    GgufJson root, map = {0}, rest, key, value;
    GgufStr *files = (GgufStr *)calloc(GGUF__ST_FILES_MAX, sizeof *files);
    size_t n_files = 0, n_tensors = 0, at = 0;
    const char *err = "";
    if (!failed && !files) failed = gguf__fail(g, "file", (GgufStr){0}, "E_NOMEM", 0, "out of memory for the index");
    if (!failed && gguf_json_parse(json, size, &root, &at, &err) < 0)
        failed = gguf__fail(g, "index", (GgufStr){0}, "E_JSON", at, "expected %s", err);
    if (!failed && (!gguf_json_get(&root, "weight_map", &map) || map.type != GGUF_J_OBJECT))
        failed = gguf__fail(g, "index", (GgufStr){0}, "E_ST_FIELD", 0, "weight_map: expected an object");
    for (rest = map; !failed && gguf_json_next(&rest, &key, &value); ) {
        const GgufStr name = value.type == GGUF_J_STRING ? (GgufStr){value.s + 1, value.n - 2} : (GgufStr){0};
        size_t i = 0;
        if (n_tensors++ == GGUF__COUNT_MAX)             // before so many names are looked up
            failed = gguf__fail(g, "index", (GgufStr){0}, "E_NTENSORS", (size_t)(key.s - json),
                                "expected at most %d tensors, got more", GGUF__COUNT_MAX);
        while (i < n_files && !(files[i].n == name.n && memcmp(files[i].s, name.s, name.n) == 0)) i++;
        if (i < n_files) continue;
        if (name.n < 1 || name.n > 255 || memchr(name.s, '/', name.n) || memchr(name.s, '\\', name.n) ||
            n_files == GGUF__ST_FILES_MAX)
            failed = gguf__fail(g, "index", (GgufStr){0}, "E_SPLIT_NAME", (size_t)(value.s - json),
                                "expected the names of at most %d files in this directory", GGUF__ST_FILES_MAX);
        else if (!failed) files[n_files++] = name;
    }
    for (size_t i = 0; i < n_files && !failed; i++) failed = gguf__st_part(g, path, files[i]);
    for (rest = map; !failed && gguf_json_next(&rest, &key, &value); ) {
        const GgufStr name = {key.s + 1, key.n - 2};
        if (!g->tensor_slots || !*gguf__tensor_slot(g, name))
            failed = gguf__fail(g, "tensor", name, "E_TENSOR_MISSING", (size_t)(key.s - json),
                                "named in the index but not in any file");
    }
    free(files);
    gguf_close(&text);
    return failed;
}

// Opens all files of the set whose first file is `path`, PREFIX-00001-of-0000N.safetensors.
static int gguf__st_numbered(Gguf *g, const char *path) {
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    const size_t prefix = strlen(name) - strlen("-00001-of-00001.safetensors");
    const int n = atoi(name + prefix + 10);
    if (n < 1 || n > GGUF__ST_FILES_MAX || prefix > 200)
        return gguf__fail(g, "file", (GgufStr){0}, "E_SPLIT_NAME", 0, "expected 1..%d parts, got %d",
                          GGUF__ST_FILES_MAX, n);
    for (int i = 1; i <= n; i++) {
        char part[256];
        snprintf(part, sizeof part, "%.*s-%05d-of-%05d.safetensors", (int)prefix, name, i, n);
        if (gguf__st_part(g, path, gguf__str(part)) < 0) return -1;
    }
    return 0;
}

// True: the name has the form PREFIX-00001-of-NNNNN.safetensors.
static bool gguf__st_is_first(const char *name) {
    const char *form = "-00001-of-NNNNN.safetensors";
    const size_t n = strlen(name), m = strlen(form);
    if (n < m) return false;
    for (size_t i = 0; i < m; i++) {
        const char c = name[n - m + i];
        if (form[i] == 'N' ? c < '0' || c > '9' : c != form[i]) return false;
    }
    return true;
}

// Finds what to open in a folder: model.safetensors, an index, or the first file of a set. 0 or < 0.
static int gguf__st_in_folder(Gguf *g, const char *folder, char *path, size_t room) {
    static const char *const names[2] = {"model.safetensors", "model.safetensors.index.json"};
    for (int i = 0; i < 2; i++)
        if ((size_t)snprintf(path, room, "%s/%s", folder, names[i]) < room && access(path, F_OK) == 0) return 0;
    DIR *dir = opendir(folder);
    int found = 0;
    for (struct dirent *e; dir && (e = readdir(dir)) != NULL; )
        if (gguf__st_is_first(e->d_name) && (size_t)snprintf(path, room, "%s/%s", folder, e->d_name) < room) found++;
    if (dir) closedir(dir);
    if (found == 1) return 0;
    return gguf__fail(g, "folder", (GgufStr){0}, "E_OPEN", 0,
                      "expected %s, its index or one numbered set of files, got %s",
                      names[0], found ? "several sets" : "none of them");
}

int gguf_open_safetensors(Gguf *g, const char *path) {
    char inside[4096];
    struct stat st;
    const char *file = path;
    int failed = 0;
    memset(g, 0, sizeof *g);
    g->path = path;
    if (stat(path, &st) == 0 && S_ISDIR(st.st_mode)) {
        failed = gguf__st_in_folder(g, path, inside, sizeof inside);
        file = inside;
    }
    const size_t m = failed ? 0 : strlen(file);
    if (!failed)
        failed = m > 11 && strcmp(file + m - 11, ".index.json") == 0 ? gguf__st_index(g, file)
               : gguf__st_is_first(file) ? gguf__st_numbered(g, file) : gguf__st_file(g, file);
    if (failed) gguf_close(g);
    return failed;
}

// ---- block formats -----------------------------------------------------------------------------------------------
// gguf__unpack is the only code that knows the formats: it unpacks 256 elements of any quantised type (eight blocks of
// 32, four of 64 or one of 256) into integer codes and their factors. Dequantising and both dot products use it.

#if defined(__GNUC__)
#define GGUF__INLINE static inline __attribute__((always_inline))   // with a constant type: no branches in the loops
#else
#define GGUF__INLINE static inline
#endif

// gcc and clang unroll short loops completely before they try to vectorise them. This prevents the early unrolling.
#if defined(__clang__)
#define GGUF__VECTOR_LOOP _Pragma("clang loop unroll(disable)")
#elif defined(__GNUC__)
#define GGUF__VECTOR_LOOP _Pragma("GCC unroll 1")
#else
#define GGUF__VECTOR_LOOP
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512VL__) && defined(__AVX512BW__)
#define GGUF__WIDE                                  // products of many rows use vectors of 512 bits
#define GGUF__DPBUSD _mm256_dpbusd_epi32
#elif defined(__AVXVNNI__)
#define GGUF__DPBUSD _mm256_dpbusd_avx_epi32
#endif

// Executes a statement with T = type, a constant in each copy of the statement. Does nothing for a type that is not
// quantised.
#define GGUF__FOR_TYPE(type, statement) \
    switch (type) { \
    GGUF__CASE(GGUF_Q8_0, statement)   GGUF__CASE(GGUF_Q4_0, statement)   GGUF__CASE(GGUF_Q4_1, statement) \
    GGUF__CASE(GGUF_Q5_0, statement)   GGUF__CASE(GGUF_Q5_1, statement)   GGUF__CASE(GGUF_Q2_K, statement) \
    GGUF__CASE(GGUF_Q3_K, statement)   GGUF__CASE(GGUF_Q4_K, statement)   GGUF__CASE(GGUF_Q5_K, statement) \
    GGUF__CASE(GGUF_Q6_K, statement)   GGUF__CASE(GGUF_IQ4_NL, statement) GGUF__CASE(GGUF_IQ4_XS, statement) \
    GGUF__CASE(GGUF_MXFP4, statement)  GGUF__CASE(GGUF_NVFP4, statement) \
    }
#define GGUF__CASE(t, statement) case t: { enum { T = t }; statement; break; }

// 32 bytes. Read and written through pointers; never passed or returned by value.
typedef uint8_t Gguf__Bytes __attribute__((vector_size(32), aligned(1), may_alias));

typedef struct {
    int8_t w[256];                  // codes in element order, with gguf__offset added
    float a[8], b[8];               // factors of each group of 32
    int32_t sc[2][8], mn[2][8];     // integer factors of the first and the second half of each group
} Gguf__Codes;

// The factors of a type. Element i of half h of group g is
//   a[g]*sc[h][g]*w + b[g]*mn[h][g]      sc (and mn): one per half, n_scales 2; one per group, 1, in [0]; none (1), 0
//   (h == 0 ? a[g] : b[g])*w             NVFP4, whose scales of 16 are floats
GGUF__INLINE int gguf__n_scales(int type) {
    if (type == GGUF_Q2_K || type == GGUF_Q3_K || type == GGUF_Q6_K) return 2;
    return type == GGUF_Q4_K || type == GGUF_Q5_K || type == GGUF_IQ4_XS;
}
GGUF__INLINE bool gguf__has_min(int type) {
    return type == GGUF_Q4_1 || type == GGUF_Q5_1 || type == GGUF_Q2_K || type == GGUF_Q4_K || type == GGUF_Q5_K;
}

// Signed codes of few bits are stored with 2^k added, so that none is negative. Returns k; 0: nothing is added.
GGUF__INLINE int gguf__offset_bits(int type) {
    return type == GGUF_Q3_K ? 2 : type == GGUF_Q4_0 ? 3 : type == GGUF_Q5_0 ? 4 : type == GGUF_Q6_K ? 5 : 0;
}
GGUF__INLINE int gguf__offset(int type) { return gguf__offset_bits(type) ? 1 << gguf__offset_bits(type) : 0; }

static inline float gguf__float_of(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static inline float gguf__f16_at(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, 2);
    return gguf_f16_to_f32(h);
}

// NVFP4: half of an unsigned E4M3 scale, because V holds doubled values.
static inline float gguf__e4m3_half(unsigned s) {
    s &= 127;
    if (s < 8) return (float)s * 0x1p-10f;
    return s == 127 ? 0 : gguf__float_of(((s >> 3) + 119) << 23 | (s & 7) << 20);
}

// MXFP4: 2^(e - 128), half of the scale for the same reason. The two smallest are subnormal; 255 is NaN.
static inline float gguf__e8m0_half(uint32_t e) {
    return e == 255 ? NAN : gguf__float_of(e >= 2 ? (e - 1) << 23 : 0x00200000u << e);
}

// The codes of nibbles.
static const int8_t gguf__nibble_t[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t gguf__nibble_v[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Unpacks 32 codes from 16 bytes: all low nibbles, then all high ones; run = 8: so for each 8 bytes. table NULL: the
// codes are the nibbles.
GGUF__INLINE void gguf__nibbles(const uint8_t *restrict q, const int8_t *restrict codes, int run, int8_t *restrict w) {
#ifdef __AVX2__
    __m256i n = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)q));
    n = _mm256_and_si256(_mm256_srlv_epi32(n, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4)), _mm256_set1_epi8(15));
    if (codes)
        n = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)codes)), n);
    if (run == 8) n = _mm256_permute4x64_epi64(n, 0xd8);
    _mm256_storeu_si256((__m256i *)(void *)w, n);
#else
    for (int at = 0; at < 16; at += run, q += run, w += 2 * run)
        for (int i = 0; i < run; i++) {
            w[i] = codes ? codes[q[i] & 15] : (int8_t)(q[i] & 15);
            w[run + i] = codes ? codes[q[i] >> 4] : (int8_t)(q[i] >> 4);
        }
#endif
}

// Adds 16 to code i if bit i of the 4 bytes at h is set.
GGUF__INLINE void gguf__fifth_bits(const uint8_t *restrict h, int8_t *restrict w) {
    uint32_t bits;
    memcpy(&bits, h, 4);
#ifdef __AVX2__
    const __m256i byte = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x((int64_t)0x8040201008040201);
    __m256i b = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int32_t)bits), byte), bit);
    b = _mm256_and_si256(_mm256_cmpeq_epi8(b, bit), _mm256_set1_epi8(16));
    __m256i *p = (__m256i *)(void *)w;
    _mm256_storeu_si256(p, _mm256_add_epi8(_mm256_loadu_si256(p), b));
#else
    for (int i = 0; i < 32; i++) w[i] = (int8_t)(w[i] + (int)(bits >> i & 1) * 16);
#endif
}

// Converts sixteen bytes, two per group, to integers: first those of the first halves, then those of the second.
GGUF__INLINE void gguf__split_halves(const void *bytes, bool is_signed, int minus, int32_t (*restrict out)[8]) {
#ifdef __AVX2__
    const __m128i b = _mm_loadu_si128((const __m128i *)bytes);
    const __m256i pair = is_signed ? _mm256_cvtepi8_epi16(b) : _mm256_cvtepu8_epi16(b), m = _mm256_set1_epi32(minus);
    const __m256i first = _mm256_srai_epi32(_mm256_slli_epi32(pair, 16), 16);
    _mm256_storeu_si256((__m256i *)(void *)out[0], _mm256_sub_epi32(first, m));
    _mm256_storeu_si256((__m256i *)(void *)out[1], _mm256_sub_epi32(_mm256_srai_epi32(pair, 16), m));
#else
    const uint8_t *b = (const uint8_t *)bytes;
    for (int i = 0; i < 16; i++) out[i % 2][i / 2] = (is_signed ? (int8_t)b[i] : b[i]) - minus;
#endif
}

// Q4_K, Q5_K: 6-bit scales sc and minima mn of the eight sub-blocks, from the twelve bytes s. Bytes 0..3 and 4..7 hold
// sc and mn of sub-blocks 0..3 in their low six bits; the rest has its low four bits in bytes 8..11 (sc low nibble, mn
// high) and its upper two on top of bytes 0..3 and 4..7. Four bytes at a time.
static inline void gguf__q4_k_scales(const uint8_t *restrict s, int32_t *restrict sc, int32_t *restrict mn) {
    uint32_t w[3];
    uint8_t bytes[16];
    for (int i = 0; i < 3; i++) memcpy(&w[i], s + 4 * i, 4);
    const uint64_t scales = (w[0] & 0x3f3f3f3f) | (uint64_t)((w[2] & 0x0f0f0f0f) | (w[0] >> 2 & 0x30303030)) << 32;
    const uint64_t minima = (w[1] & 0x3f3f3f3f) | (uint64_t)((w[2] >> 4 & 0x0f0f0f0f) | (w[1] >> 2 & 0x30303030)) << 32;
    memcpy(bytes, &scales, 8);
    memcpy(bytes + 8, &minima, 8);
    for (int g = 0; g < 8; g++) sc[g] = bytes[g];
    for (int g = 0; g < 8; g++) mn[g] = bytes[8 + g];
}

// Q3_K: the 6-bit scales of the sixteen sub-blocks. The low four bits are in the low nibbles of bytes 0..7 of s, then
// in the high nibbles; the upper two bits of sub-block j are in bits 2*(j/4) of byte 8 + j%4.
static inline void gguf__q3_k_scales(const uint8_t *restrict s, int32_t (*restrict sc)[8]) {
    uint32_t w[3], packed[4];
    memcpy(w, s, 12);
    for (int k = 0; k < 4; k++)
        packed[k] = (w[k % 2] >> (k / 2 * 4) & 0x0f0f0f0f) | (w[2] >> (2 * k) & 0x03030303) << 4;
    gguf__split_halves(packed, false, 32, sc);
}

// Q4_K: element 64*p + l is the low nibble of q[32*p + l], element 64*p + 32 + l the high one.
GGUF__INLINE void gguf__q4_k_codes(const uint8_t *restrict b, int8_t *restrict codes) {
    const Gguf__Bytes *q = (const Gguf__Bytes *)(const void *)b;
    Gguf__Bytes *w = (Gguf__Bytes *)(void *)codes;
    w[0] = q[0] & 15;
    w[1] = q[0] >> 4;
    w[2] = q[1] & 15;
    w[3] = q[1] >> 4;
    w[4] = q[2] & 15;
    w[5] = q[2] >> 4;
    w[6] = q[3] & 15;
    w[7] = q[3] >> 4;
}

// Q5_K: as Q4_K, and bit g of h[l] is the fifth bit of element 32*g + l.
GGUF__INLINE void gguf__q5_k_codes(const uint8_t *restrict b, int8_t *restrict codes) {
    const Gguf__Bytes h = *(const Gguf__Bytes *)(const void *)b;
    Gguf__Bytes *w = (Gguf__Bytes *)(void *)codes;
    gguf__q4_k_codes(b + 32, codes);
    w[0] |= h << 4 & 16;
    w[1] |= h << 3 & 16;
    w[2] |= h << 2 & 16;
    w[3] |= h << 1 & 16;
    w[4] |= h & 16;
    w[5] |= h >> 1 & 16;
    w[6] |= h >> 2 & 16;
    w[7] |= h >> 3 & 16;
}

// Q6_K: each half of 128 elements has 64 bytes ql and 32 bytes qh; element 32*k + l of it takes a nibble of
// ql[32*(k&1) + l] (low for k < 2) and bits 2k, 2k+1 of qh[l] above it.
GGUF__INLINE void gguf__q6_k_codes(const uint8_t *restrict b, int8_t *restrict codes) {
    const Gguf__Bytes *ql = (const Gguf__Bytes *)(const void *)b, *qh = ql + 4;
    Gguf__Bytes *w = (Gguf__Bytes *)(void *)codes;
    w[0] = (ql[0] & 15) | (qh[0] << 4 & 48);
    w[1] = (ql[1] & 15) | (qh[0] << 2 & 48);
    w[2] = ql[0] >> 4 | (qh[0] & 48);
    w[3] = ql[1] >> 4 | (qh[0] >> 2 & 48);
    w[4] = (ql[2] & 15) | (qh[1] << 4 & 48);
    w[5] = (ql[3] & 15) | (qh[1] << 2 & 48);
    w[6] = ql[2] >> 4 | (qh[1] & 48);
    w[7] = ql[3] >> 4 | (qh[1] >> 2 & 48);
}

// Q2_K, Q3_K: element 128*n + 32*k + l is bits 2k, 2k+1 of q[32*n + l]; in Q3_K, bit 4*n + k of h[l] comes above them.
GGUF__INLINE void gguf__q2_k_codes(const uint8_t *restrict b, int8_t *restrict codes) {
    const Gguf__Bytes *q = (const Gguf__Bytes *)(const void *)b;
    Gguf__Bytes *w = (Gguf__Bytes *)(void *)codes;
    w[0] = q[0] & 3;
    w[1] = q[0] >> 2 & 3;
    w[2] = q[0] >> 4 & 3;
    w[3] = q[0] >> 6;
    w[4] = q[1] & 3;
    w[5] = q[1] >> 2 & 3;
    w[6] = q[1] >> 4 & 3;
    w[7] = q[1] >> 6;
}
GGUF__INLINE void gguf__q3_k_codes(const uint8_t *restrict b, int8_t *restrict codes) {
    const Gguf__Bytes h = *(const Gguf__Bytes *)(const void *)b;
    Gguf__Bytes *w = (Gguf__Bytes *)(void *)codes;
    gguf__q2_k_codes(b + 32, codes);
    w[0] |= h << 2 & 4;
    w[1] |= h << 1 & 4;
    w[2] |= h & 4;
    w[3] |= h >> 1 & 4;
    w[4] |= h >> 2 & 4;
    w[5] |= h >> 3 & 4;
    w[6] |= h >> 4 & 4;
    w[7] |= h >> 5 & 4;
}

// Unpacks n groups of 32 of the types with blocks of 32 or 64. False: the type has larger blocks.
GGUF__INLINE bool gguf__unpack_groups(int type, const uint8_t *restrict b, int n, Gguf__Codes *restrict c) {
    switch (type) {
    case GGUF_Q8_0:
        for (int g = 0; g < n; g++, b += 34) {
            memcpy(c->w + 32 * g, b + 2, 32);
            c->a[g] = gguf__f16_at(b);
        }
        return true;
    case GGUF_Q4_0:
    case GGUF_IQ4_NL:
        for (int g = 0; g < n; g++, b += 18) {
            gguf__nibbles(b + 2, type == GGUF_Q4_0 ? NULL : gguf__nibble_t, 16, c->w + 32 * g);
            c->a[g] = gguf__f16_at(b);
        }
        return true;
    case GGUF_Q4_1:
        for (int g = 0; g < n; g++, b += 20) {
            gguf__nibbles(b + 4, NULL, 16, c->w + 32 * g);
            c->a[g] = gguf__f16_at(b);
            c->b[g] = gguf__f16_at(b + 2);
        }
        return true;
    case GGUF_Q5_0:
        for (int g = 0; g < n; g++, b += 22) {
            gguf__nibbles(b + 6, NULL, 16, c->w + 32 * g);
            gguf__fifth_bits(b + 2, c->w + 32 * g);
            c->a[g] = gguf__f16_at(b);
        }
        return true;
    case GGUF_Q5_1:
        for (int g = 0; g < n; g++, b += 24) {
            gguf__nibbles(b + 8, NULL, 16, c->w + 32 * g);
            gguf__fifth_bits(b + 4, c->w + 32 * g);
            c->a[g] = gguf__f16_at(b);
            c->b[g] = gguf__f16_at(b + 2);
        }
        return true;
    case GGUF_MXFP4:
        for (int g = 0; g < n; g++, b += 17) {
            gguf__nibbles(b + 1, gguf__nibble_v, 16, c->w + 32 * g);
            c->a[g] = gguf__e8m0_half(b[0]);
        }
        return true;
    case GGUF_NVFP4:
        for (int g = 0; g < n; g++) {
            const uint8_t *s = b + g / 2 * 36 + g % 2 * 2, *q = b + g / 2 * 36 + 4 + g % 2 * 16;
            gguf__nibbles(q, gguf__nibble_v, 8, c->w + 32 * g);
            c->a[g] = gguf__e4m3_half(s[0]);
            c->b[g] = gguf__e4m3_half(s[1]);
        }
        return true;
    }
    return false;
}

// Unpacks a block of 256, which has one d for all groups.
GGUF__INLINE void gguf__unpack_256(int type, const uint8_t *restrict b, Gguf__Codes *restrict c) {
    float d, dmin = 0;
    switch (type) {
    case GGUF_Q4_K:
    case GGUF_Q5_K:
        d = gguf__f16_at(b);
        dmin = gguf__f16_at(b + 2);
        gguf__q4_k_scales(b + 4, c->sc[0], c->mn[0]);
        if (type == GGUF_Q4_K) gguf__q4_k_codes(b + 16, c->w);
        else gguf__q5_k_codes(b + 16, c->w);
        break;
    case GGUF_Q6_K:
        d = gguf__f16_at(b + 208);
        gguf__q6_k_codes(b, c->w);
        gguf__split_halves(b + 192, true, 0, c->sc);
        break;
    case GGUF_Q3_K:
        d = gguf__f16_at(b + 108);
        gguf__q3_k_codes(b, c->w);
        gguf__q3_k_scales(b + 96, c->sc);
        break;
    case GGUF_Q2_K:
        d = gguf__f16_at(b + 80);
        dmin = gguf__f16_at(b + 82);
        gguf__q2_k_codes(b + 16, c->w);
        gguf__split_halves(b, false, 0, c->sc);
        for (int h = 0; h < 2; h++)
            GGUF__VECTOR_LOOP for (int g = 0; g < 8; g++) {
                c->mn[h][g] = c->sc[h][g] >> 4;
                c->sc[h][g] &= 15;
            }
        break;
    default:                                        // IQ4_XS: low four bits in nibbles, upper two in 16 bits
        d = gguf__f16_at(b);
        for (int g = 0; g < 8; g++) {
            gguf__nibbles(b + 8 + 16 * g, gguf__nibble_t, 16, c->w + 32 * g);
            c->sc[0][g] = ((b[4 + g / 2] >> (g % 2 * 4) & 15) | (b[2 + g / 4] >> (g % 4 * 2) & 3) << 4) - 32;
        }
    }
    for (int g = 0; g < 8; g++) {
        c->a[g] = d;
        c->b[g] = -dmin;
    }
}

// Unpacks 256 elements at b; at the end of a row only the remaining n groups of 32, and zeros after them.
GGUF__INLINE void gguf__unpack(int type, const uint8_t *restrict b, int n, Gguf__Codes *restrict c) {
    if (n < 8) {
        memset(c->w, 0, sizeof c->w);
        memset(c->a, 0, sizeof c->a);
        memset(c->b, 0, sizeof c->b);
    }
    if (!gguf__unpack_groups(type, b, n, c)) gguf__unpack_256(type, b, c);
}

// Converts up to 32 elements of a float type to f32.
static inline void gguf__floats(int type, const uint8_t *p, float *dst, int n) {
    if (type == GGUF_F32) {
        memcpy(dst, p, (size_t)n * 4);
        return;
    }
    uint16_t h[32];
    memcpy(h, p, (size_t)n * 2);
    if (type == GGUF_BF16) {
        for (int i = 0; i < n; i++) dst[i] = gguf_bf16_to_f32(h[i]);
        return;
    }
#ifdef __F16C__
    if (n == 32) {
        for (int i = 0; i < 32; i += 8)
            _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(h + i))));
        return;
    }
#endif
    for (int i = 0; i < n; i++) dst[i] = gguf_f16_to_f32(h[i]);
}

GGUF__INLINE void gguf__dequantize(int type, const uint8_t *b, float *dst, size_t n) {
    const size_t bytes = (size_t)256 / gguf__types[type].elems * gguf__types[type].bytes;
    const int n_scales = gguf__n_scales(type), offset = gguf__offset(type);
    Gguf__Codes c;
    for (size_t left = n; left > 0; b += bytes, dst += 256) {
        gguf__unpack(type, b, left < 256 ? (int)(left / 32) : 8, &c);
        for (size_t j = 0; j < 16 && j * 16 < left; j++) {
            const size_t g = j / 2, h = j % 2;
            const float a = type == GGUF_NVFP4 && h ? c.b[g] : c.a[g];
            const float s = n_scales ? a * (float)c.sc[n_scales == 2 ? h : 0][g] : a;
            const float m = n_scales ? c.b[g] * (float)c.mn[n_scales == 2 ? h : 0][g] : c.b[g];
            if (gguf__has_min(type)) for (size_t i = 16 * j; i < 16 * j + 16; i++) dst[i] = s * c.w[i] + m;
            else for (size_t i = 16 * j; i < 16 * j + 16; i++) dst[i] = s * (c.w[i] - offset);
        }
        left -= left < 256 ? left : 256;
    }
}

void gguf_dequantize(int type, const void *src, float *dst, size_t n) {
    const uint8_t *b = (const uint8_t *)src;
    const int elems = gguf_block_elems(type), bytes = gguf_block_bytes(type);
    assert(gguf_type_supported(type) && n % (size_t)elems == 0);
    if (elems == 1) {
        for (; n >= 32; n -= 32, b += 32 * bytes, dst += 32) gguf__floats(type, b, dst, 32);
        gguf__floats(type, b, dst, (int)n);
        return;
    }
    GGUF__FOR_TYPE(type, gguf__dequantize(T, b, dst, n))
}

void gguf_quantize_q8(const float *x, int8_t *q, float *scale, size_t n) {
    assert(n % 32 == 0);
    for (; n >= 32; n -= 32, x += 32, q += 32, scale++) {
        uint32_t bits[32], top = 0;                 // of |x|: ordered like the floats, with NaN above Inf
        memcpy(bits, x, sizeof bits);
        for (int i = 0; i < 32; i++) {
            uint32_t u = bits[i] & 0x7fffffff;
            top = u > top ? u : top;
        }
        float max = gguf__float_of(top), inv = 0;
        if (top >= 0x7f800000) *scale = NAN;
        else if (max < 0x1p-120f) *scale = 0;
        else *scale = max / 127, inv = 127 / max;
        if (inv == 0) memset(q, 0, 32);
        else for (int i = 0; i < 32; i++) q[i] = (int8_t)(int)rintf(x[i] * inv);
    }
}

static inline float gguf__fold(float *acc, int n) {
    for (int h = n / 2; h > 0; h /= 2)
        for (int j = 0; j < h; j++) acc[j] += acc[j + h];
    return acc[0];
}

#ifdef __AVX512F__
// Converts 16 elements of a float type to f32.
GGUF__INLINE __m512 gguf__16_floats(int type, const uint8_t *p) {
    if (type == GGUF_F32) return _mm512_loadu_ps(p);
    const __m256i h = _mm256_loadu_si256((const __m256i *)(const void *)p);
    if (type == GGUF_F16) return _mm512_cvtph_ps(h);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
#define GGUF__ADD_PRODUCT(acc, w, x) acc = _mm512_add_ps(acc, _mm512_mul_ps(w, _mm512_loadu_ps(x)))
#endif

GGUF__INLINE float gguf__dot_floats(int type, const uint8_t *p, const float *x, size_t n) {
    const size_t bytes = (size_t)gguf__types[type].bytes;
    float acc[32] = {0}, w[32];
#ifdef __AVX512F__
    __m512 a0 = _mm512_setzero_ps(), a1 = a0;
    for (; n >= 32; n -= 32, x += 32, p += 32 * bytes) {
        GGUF__ADD_PRODUCT(a0, gguf__16_floats(type, p), x);
        GGUF__ADD_PRODUCT(a1, gguf__16_floats(type, p + 16 * bytes), x + 16);
    }
    _mm512_storeu_ps(acc, a0);
    _mm512_storeu_ps(acc + 16, a1);
#else
    for (; n >= 32; n -= 32, x += 32, p += 32 * bytes) {
        gguf__floats(type, p, w, 32);
        GGUF__VECTOR_LOOP for (int j = 0; j < 32; j++) acc[j] += w[j] * x[j];
    }
#endif
    gguf__floats(type, p, w, (int)n);
    for (size_t j = 0; j < n; j++) acc[j] += w[j] * x[j];
    return gguf__fold(acc, 32);
}

float gguf_dot_f32(int type, const void *row, const float *x, size_t n) {
    const uint8_t *p = (const uint8_t *)row;
    assert(type == GGUF_F32 || type == GGUF_F16 || type == GGUF_BF16);
    if (type == GGUF_F32) return gguf__dot_floats(GGUF_F32, p, x, n);
    return type == GGUF_F16 ? gguf__dot_floats(GGUF_F16, p, x, n) : gguf__dot_floats(GGUF_BF16, p, x, n);
}

// One weight row times four rows of x; each weight is converted once. With AVX-512 all partial sums are in registers.
GGUF__INLINE void gguf__dot_four(int type, const uint8_t *p, const float *x, size_t x_stride, size_t n, float *out,
                                 size_t out_stride) {
    const size_t bytes = (size_t)gguf__types[type].bytes;
    float w[32], acc[4][32] = {{0}};
#ifdef __AVX512F__
    __m512 a0 = _mm512_setzero_ps(), a1 = a0, b0 = a0, b1 = a0, c0 = a0, c1 = a0, d0 = a0, d1 = a0;
    for (; n >= 32; n -= 32, x += 32, p += 32 * bytes) {
        const __m512 w0 = gguf__16_floats(type, p), w1 = gguf__16_floats(type, p + 16 * bytes);
        GGUF__ADD_PRODUCT(a0, w0, x);
        GGUF__ADD_PRODUCT(a1, w1, x + 16);
        GGUF__ADD_PRODUCT(b0, w0, x + x_stride);
        GGUF__ADD_PRODUCT(b1, w1, x + x_stride + 16);
        GGUF__ADD_PRODUCT(c0, w0, x + 2 * x_stride);
        GGUF__ADD_PRODUCT(c1, w1, x + 2 * x_stride + 16);
        GGUF__ADD_PRODUCT(d0, w0, x + 3 * x_stride);
        GGUF__ADD_PRODUCT(d1, w1, x + 3 * x_stride + 16);
    }
    const __m512 sums[8] = {a0, a1, b0, b1, c0, c1, d0, d1};
    memcpy(acc, sums, sizeof acc);
#else
    for (; n >= 32; n -= 32, x += 32, p += 32 * bytes) {
        gguf__floats(type, p, w, 32);
        for (size_t r = 0; r < 4; r++) {
            const float *xr = x + r * x_stride;
            GGUF__VECTOR_LOOP for (int j = 0; j < 32; j++) acc[r][j] += w[j] * xr[j];
        }
    }
#endif
    gguf__floats(type, p, w, (int)n);
    for (int r = 0; r < 4; r++, x += x_stride) {
        for (size_t j = 0; j < n; j++) acc[r][j] += w[j] * x[j];
        out[(size_t)r * out_stride] = gguf__fold(acc[r], 32);
    }
}

GGUF__INLINE void gguf__dot_float_rows(int type, const uint8_t *w, size_t n_w, size_t w_stride, const float *x,
                                       size_t n_rows, size_t x_stride, size_t n, float *out, size_t out_stride) {
    size_t r = 0;
    for (; n_rows - r >= 4; r += 4)                 // four rows stay in the L1 cache while all weights are read
        for (size_t i = 0; i < n_w; i++)
            gguf__dot_four(type, w + i * w_stride, x + r * x_stride, x_stride, n, out + r * out_stride + i, out_stride);
    for (; r < n_rows; r++)
        for (size_t i = 0; i < n_w; i++)
            out[r * out_stride + i] = gguf__dot_floats(type, w + i * w_stride, x + r * x_stride, n);
}

void gguf_dot_f32_rows(int type, const void *w, size_t n_w, size_t w_stride, const float *x, size_t n_rows,
                       size_t x_stride, size_t n, float *out, size_t out_stride) {
    const uint8_t *p = (const uint8_t *)w;
    assert(type == GGUF_F32 || type == GGUF_F16 || type == GGUF_BF16);
    if (type == GGUF_F32) gguf__dot_float_rows(GGUF_F32, p, n_w, w_stride, x, n_rows, x_stride, n, out, out_stride);
    else if (type == GGUF_F16)
        gguf__dot_float_rows(GGUF_F16, p, n_w, w_stride, x, n_rows, x_stride, n, out, out_stride);
    else gguf__dot_float_rows(GGUF_BF16, p, n_w, w_stride, x, n_rows, x_stride, n, out, out_stride);
}

// Adds the terms of eight groups to the partial sums. dot and sum hold the sums of w*q and of q, for both halves of
// each group; sum is read only if the type has a minimum. The AVX2 code does the same as the loop, for eight groups at
// a time.
GGUF__INLINE void gguf__add_terms(int type, const Gguf__Codes *restrict c, const int32_t (*restrict dot)[8],
                                  const int32_t (*restrict sum)[8], const float *restrict scale, float *restrict acc) {
    const int n_scales = gguf__n_scales(type);
#ifdef __AVX2__
#define GGUF__INTS(p)   _mm256_loadu_si256((const __m256i *)(const void *)(p))
#define GGUF__FLOATS(p) _mm256_loadu_ps(p)
    __m256i i0 = GGUF__INTS(dot[0]), i1 = GGUF__INTS(dot[1]), m0, m1;
    __m256 s = GGUF__FLOATS(scale), a = _mm256_mul_ps(GGUF__FLOATS(c->a), s), term;
    if (type == GGUF_NVFP4) {
        term = _mm256_add_ps(_mm256_mul_ps(a, _mm256_cvtepi32_ps(i0)),
                             _mm256_mul_ps(_mm256_mul_ps(GGUF__FLOATS(c->b), s), _mm256_cvtepi32_ps(i1)));
    } else {
        if (n_scales == 2) i0 = _mm256_mullo_epi32(i0, GGUF__INTS(c->sc[0]));
        if (n_scales == 2) i1 = _mm256_mullo_epi32(i1, GGUF__INTS(c->sc[1]));
        i0 = _mm256_add_epi32(i0, i1);
        if (n_scales == 1) i0 = _mm256_mullo_epi32(i0, GGUF__INTS(c->sc[0]));
        term = _mm256_mul_ps(a, _mm256_cvtepi32_ps(i0));
    }
    if (gguf__has_min(type)) {
        m0 = GGUF__INTS(sum[0]);
        m1 = GGUF__INTS(sum[1]);
        if (n_scales == 2) m0 = _mm256_mullo_epi32(m0, GGUF__INTS(c->mn[0]));
        if (n_scales == 2) m1 = _mm256_mullo_epi32(m1, GGUF__INTS(c->mn[1]));
        m0 = _mm256_add_epi32(m0, m1);
        if (n_scales == 1) m0 = _mm256_mullo_epi32(m0, GGUF__INTS(c->mn[0]));
        term = _mm256_add_ps(term, _mm256_mul_ps(_mm256_mul_ps(GGUF__FLOATS(c->b), s), _mm256_cvtepi32_ps(m0)));
    }
    _mm256_storeu_ps(acc, _mm256_add_ps(GGUF__FLOATS(acc), term));
#undef GGUF__INTS
#undef GGUF__FLOATS
#else
    for (int g = 0; g < 8; g++) {
        float term;
        if (type == GGUF_NVFP4) {
            term = (c->a[g] * scale[g]) * (float)dot[0][g] + (c->b[g] * scale[g]) * (float)dot[1][g];
        } else {
            int32_t i = dot[0][g] + dot[1][g];
            if (n_scales == 1) i *= c->sc[0][g];
            if (n_scales == 2) i = c->sc[0][g] * dot[0][g] + c->sc[1][g] * dot[1][g];
            term = (c->a[g] * scale[g]) * (float)i;
        }
        if (gguf__has_min(type)) {
            int32_t m = sum[0][g] + sum[1][g];
            if (n_scales == 1) m *= c->mn[0][g];
            if (n_scales == 2) m = c->mn[0][g] * sum[0][g] + c->mn[1][g] * sum[1][g];
            term += (c->b[g] * scale[g]) * (float)m;
        }
        acc[g] += term;
    }
#endif
}

// A part of 256 elements is 64 words of four codes: 8 words for each of 8 groups. Weights and activations are permuted
// from [group][word] to: words k and k + 4 of the even groups for k = 0 .. 3, then of the odd groups. With this order,
// four steps of four products leave the sum of each half group in its own lane, so that no sum across lanes is needed.
// For codes with 2^k added, the sum starts from -2^k times the sum of the activations. GGUF__DPBUSD multiplies unsigned
// by signed bytes, so codes that are still signed get 128 added.
typedef struct {
    int8_t q[256];
    int32_t sum[2][8], start[2][8]; // of q, both halves of each group; -128 times that
#ifdef GGUF__WIDE                   // what panels read: q in element order, its sums over both halves and the group
    int8_t in_order[256];
    float sums[3][8];
#endif
    float scale[8];
} Gguf__Acts;

typedef struct {
    Gguf__Codes c;
    int8_t words[256];
} Gguf__Weights;

enum { GGUF__TILE_W = 4, GGUF__TILE_ROWS = 32 };        // weight rows and activation rows of a tile

#ifdef GGUF__DPBUSD
enum { GGUF__DOT_OF_UNSIGNED = 1 };
#else
enum { GGUF__DOT_OF_UNSIGNED = 0 };
#endif

GGUF__INLINE bool gguf__is_signed(int type) { return !gguf__has_min(type) && !gguf__offset_bits(type); }

size_t gguf_packed_size(size_t n) { return (n + 255) / 256 * sizeof(Gguf__Acts); }

// Loads the words of four groups, which are `stride` bytes apart.
GGUF__INLINE void gguf__transpose_words(const void *in, size_t stride, int flip, int8_t *out) {
#ifdef __AVX2__
    __m256i a[4], lo[2], hi[2];
    for (int i = 0; i < 4; i++)
        a[i] = _mm256_loadu_si256((const __m256i *)(const void *)((const char *)in + i * stride));
    for (int i = 0; i < 4 && flip; i++) a[i] = _mm256_xor_si256(a[i], _mm256_set1_epi8((char)flip));
    for (int i = 0; i < 2; i++) {
        lo[i] = _mm256_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
        hi[i] = _mm256_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
    }
    __m256i *o = (__m256i *)(void *)out;
    _mm256_storeu_si256(o, _mm256_unpacklo_epi64(lo[0], lo[1]));
    _mm256_storeu_si256(o + 1, _mm256_unpackhi_epi64(lo[0], lo[1]));
    _mm256_storeu_si256(o + 2, _mm256_unpacklo_epi64(hi[0], hi[1]));
    _mm256_storeu_si256(o + 3, _mm256_unpackhi_epi64(hi[0], hi[1]));
#else
    (void)flip;
    for (int i = 0; i < 32; i++)                    // word k + 4h of group j, i = 8k + 4h + j
        memcpy(out + 4 * i, (const char *)in + i % 4 * stride + 4 * (i / 8 + i / 4 % 2 * 4), 4);
#endif
}

#if defined(__AVX2__) && !defined(GGUF__DPBUSD)
// Twice this number of products of a code and an activation fits into 16 bits: for codes up to 31, up to 63, of 8 bits.
GGUF__INLINE int gguf__pairs_in_16(int type) { return gguf__is_signed(type) ? 1 : type == GGUF_Q6_K ? 2 : 4; }
#endif

// dot[h][g] = sum over half h of group g, of codes and activations in the permuted order. The sums are exact, so all
// variants give the same bits; |q| <= 127. The AVX2 variant without GGUF__DPBUSD moves the sign of signed codes, which
// are >= -128, to q.
GGUF__INLINE void gguf__dot_words(int type, const int8_t *restrict w, const Gguf__Acts *restrict x,
                                  int32_t (*restrict dot)[8]) {
    const int offset_bits = gguf__is_signed(type) ? GGUF__DOT_OF_UNSIGNED * 7 : gguf__offset_bits(type);
#if defined(__AVX2__)
    __m256i sum[2];                                 // of even and of odd groups
    for (int odd = 0; odd < 2; odd++) {
        const __m256i *wp = (const __m256i *)(const void *)(w + 128 * odd);
        const __m256i *qp = (const __m256i *)(const void *)(x->q + 128 * odd);
        __m256i s = _mm256_setzero_si256();
#ifdef GGUF__DPBUSD
        for (int k = 0; k < 4; k++) s = GGUF__DPBUSD(s, _mm256_loadu_si256(wp + k), _mm256_loadu_si256(qp + k));
#else
        __m256i pairs = s;
        for (int k = 0; k < 4; k++) {
            __m256i a = _mm256_loadu_si256(wp + k), b = _mm256_loadu_si256(qp + k);
            if (gguf__is_signed(type)) {
                b = _mm256_sign_epi8(b, a);
                a = _mm256_abs_epi8(a);
            }
            const __m256i product = _mm256_maddubs_epi16(a, b);
            pairs = k % gguf__pairs_in_16(type) ? _mm256_add_epi16(pairs, product) : product;
            if ((k + 1) % gguf__pairs_in_16(type) == 0)
                s = _mm256_add_epi32(s, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        }
#endif
        sum[odd] = s;
    }
    const __m256i lo = _mm256_unpacklo_epi32(sum[0], sum[1]), hi = _mm256_unpackhi_epi32(sum[0], sum[1]);
    sum[0] = _mm256_permute2x128_si256(lo, hi, 0x20);
    sum[1] = _mm256_permute2x128_si256(lo, hi, 0x31);
    for (int h = 0; h < 2; h++) {
        const __m256i start = _mm256_loadu_si256((const __m256i *)(const void *)x->start[h]);
        if (offset_bits) sum[h] = _mm256_add_epi32(sum[h], _mm256_srai_epi32(start, 7 - offset_bits));
        _mm256_storeu_si256((__m256i *)(void *)dot[h], sum[h]);
    }
#else
    for (int h = 0; h < 2; h++) {
#if defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
        int32x4x2_t s = {{vdupq_n_s32(0), vdupq_n_s32(0)}};
        for (int odd = 0; odd < 2; odd++)
            for (int at = 128 * odd + 16 * h; at < 128 * odd + 128; at += 32)
                s.val[odd] = vdotq_s32(s.val[odd], vld1q_s8(w + at), vld1q_s8(x->q + at));
        vst2q_s32(dot[h], s);
#else
        for (int g = 0; g < 8; g++) dot[h][g] = 0;
        for (int odd = 0; odd < 2; odd++)
            for (int at = 128 * odd + 16 * h; at < 128 * odd + 128; at += 32)
                for (int i = 0; i < 16; i++) dot[h][i / 4 * 2 + odd] += w[at + i] * x->q[at + i];
#endif
        for (int g = 0; g < 8 && offset_bits; g++) dot[h][g] += x->start[h][g] >> (7 - offset_bits);
    }
#endif
}

// Packs n <= 256 values. Fewer than 256 are repeated until the part is full: then one part can hold the last groups of
// several weight rows.
static void gguf__pack(const int8_t *q, const float *scale, size_t n, Gguf__Acts *p) {
    int8_t part[256], ones[256];
    for (size_t at = 0; at < 256; at += n) {
        const size_t m = 256 - at < n ? 256 - at : n;
        memcpy(part + at, q, m);
        memcpy(p->scale + at / 32, scale, m / 32 * sizeof *scale);
    }
    for (int odd = 0; odd < 2; odd++) gguf__transpose_words(part + 32 * odd, 64, 0, p->q + 128 * odd);
    memset(ones, 1, sizeof ones);
    gguf__dot_words(GGUF_Q4_1, ones, p, p->sum);    // Q4_1: codes have neither sign nor offset
    for (int i = 0; i < 16; i++) p->start[i / 8][i % 8] = -128 * p->sum[i / 8][i % 8];
#ifdef GGUF__WIDE
    memcpy(p->in_order, part, sizeof part);
    for (int i = 0; i < 16; i++) p->sums[i / 8][i % 8] = (float)p->sum[i / 8][i % 8];
    for (int g = 0; g < 8; g++) p->sums[2][g] = p->sums[0][g] + p->sums[1][g];
#endif
}

void gguf_pack_q8(const int8_t *q, const float *scale, size_t n, void *packed) {
    Gguf__Acts *p = (Gguf__Acts *)packed;
    assert(n % 32 == 0);
    for (; n > 256; n -= 256, q += 256, scale += 8) gguf__pack(q, scale, 256, p++);
    if (n) gguf__pack(q, scale, n, p);
}

// Unpacks n groups of a weight row at b into a part. A byte of Q4_K holds an element of an even group and one of an odd
// group, so the bytes are permuted before they are split into nibbles: that is half as much data to permute.
GGUF__INLINE void gguf__unpack_words(int type, const uint8_t *b, int n, Gguf__Weights *restrict w) {
    const int flip = GGUF__DOT_OF_UNSIGNED && gguf__is_signed(type) ? -128 : 0;
    Gguf__Bytes *words = (Gguf__Bytes *)(void *)w->words;
    gguf__unpack(type, b, n, &w->c);
    if (type == GGUF_Q4_K) {
        gguf__transpose_words(b + 16, 32, 0, w->words);
        for (int k = 0; k < 4; k++) {
            words[k + 4] = words[k] >> 4;
            words[k] &= 15;
        }
    } else {
        for (int odd = 0; odd < 2; odd++) gguf__transpose_words(w->c.w + 32 * odd, 64, flip, w->words + 128 * odd);
    }
}

GGUF__INLINE void gguf__add_part(int type, const Gguf__Weights *restrict w, const Gguf__Acts *restrict x,
                                 float *restrict acc) {
    int32_t dot[2][8];
    gguf__dot_words(type, w->words, x, dot);
    gguf__add_terms(type, &w->c, dot, x->sum, x->scale, acc);
}

GGUF__INLINE float gguf__dot(int type, const uint8_t *b, const int8_t *q, const float *scale, size_t n) {
    const size_t bytes = (size_t)256 / gguf__types[type].elems * gguf__types[type].bytes;
    float acc[8] = {0};
    Gguf__Weights w;
    Gguf__Acts x;
    for (size_t m; n > 0; n -= m, b += bytes, q += 256, scale += 8) {
        m = n < 256 ? n : 256;
        gguf__unpack_words(type, b, (int)(m / 32), &w);
        gguf__pack(q, scale, m, &x);
        gguf__add_part(type, &w, &x, acc);
    }
    return gguf__fold(acc, 8);
}

float gguf_dot_q8(int type, const void *row, const int8_t *q, const float *scale, size_t n) {
    const uint8_t *b = (const uint8_t *)row;
    float y = NAN;
    assert(gguf_type_supported(type) && gguf_block_elems(type) >= 32 && n % (size_t)gguf_block_elems(type) == 0);
    GGUF__FOR_TYPE(type, y = gguf__dot(T, b, q, scale, n))
    return y;
}

// n_w <= GGUF__TILE_W weight rows times n_rows <= GGUF__TILE_ROWS activation rows.
GGUF__INLINE void gguf__dot_tile(int type, const uint8_t *b, size_t row_size, size_t n_w, const Gguf__Acts *x,
                                 size_t parts, size_t n_rows, size_t n, float *out, size_t out_stride) {
    const size_t bytes = (size_t)256 / gguf__types[type].elems * gguf__types[type].bytes;
    float acc[GGUF__TILE_ROWS][GGUF__TILE_W][8];
    Gguf__Weights w[GGUF__TILE_W];
    memset(acc, 0, n_rows * sizeof *acc);
    for (size_t part = 0; part < parts; part++, x++, n -= 256) {
        const int groups = n < 256 ? (int)(n / 32) : 8;
        for (size_t i = 0; i < n_w; i++) gguf__unpack_words(type, b + i * row_size + part * bytes, groups, &w[i]);
        for (size_t r = 0; r < n_rows; r++)
            for (size_t i = 0; i < n_w; i++) gguf__add_part(type, &w[i], x + r * parts, acc[r][i]);
    }
    for (size_t r = 0; r < n_rows; r++)
        for (size_t i = 0; i < n_w; i++) out[r * out_stride + i] = gguf__fold(acc[r][i], 8);
}

// acc[g] += ends[at + g], g < n.
GGUF__INLINE void gguf__add_ends(float *acc, const float *ends, size_t at, size_t n) {
#ifdef __AVX2__
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), from = _mm256_set1_epi32((int)at);
    const __m256i is_used = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), lane);
    const __m256 moved = _mm256_permutevar8x32_ps(_mm256_loadu_ps(ends), _mm256_add_epi32(lane, from));
    _mm256_storeu_ps(acc, _mm256_add_ps(_mm256_loadu_ps(acc), _mm256_and_ps(moved, _mm256_castsi256_ps(is_used))));
#else
    for (size_t g = 0; g < n; g++) acc[g] += ends[at + g];
#endif
}

// n_w weight rows times one activation row, one weight row after the other. The groups after the last whole part of a
// row are processed together with those of other rows, as many as fill a part. has_rest: there may be such groups; a
// constant, since the loop over parts is faster without them. Weights are prefetched one page ahead, because they come
// from main memory and the hardware prefetcher stops at the end of a page.
enum { GGUF__AHEAD = 4096 };  // bytes
GGUF__INLINE void gguf__dot_row(int type, bool has_rest, const uint8_t *b, size_t row_size, size_t n_w,
                                const Gguf__Acts *x, size_t n, float *out) {
    const size_t bytes = (size_t)256 / gguf__types[type].elems * gguf__types[type].bytes;
    const size_t parts = n / 256, rest = has_rest && gguf__types[type].elems < 256 ? n % 256 / 32 : 0;
    const size_t at_once = rest ? 8 / rest : 1;
    const size_t rest_bytes = row_size - parts * bytes;
    float ends[8] = {0};
    Gguf__Weights w;
    for (size_t i = 0; i < n_w; i++, b += row_size) {
        float acc[8] = {0};
        if (rest && i % at_once == 0) {
            const size_t rows = n_w - i < at_once ? n_w - i : at_once;
            uint8_t blocks[8 * 34];             // Q8_0 has the largest. Rows shorter than a part are already adjacent
            for (size_t r = 0; r < rows && parts; r++)
                memcpy(blocks + r * rest_bytes, b + r * row_size + parts * bytes, rest_bytes);
            gguf__unpack_words(type, parts ? blocks : b, (int)(rows * rest), &w);
            memset(ends, 0, sizeof ends);
            gguf__add_part(type, &w, x + parts, ends);
        }
        for (size_t part = 0; part < parts; part++) {
            for (size_t k = 0; k < bytes; k += 64) __builtin_prefetch(b + part * bytes + GGUF__AHEAD + k);
            gguf__unpack_words(type, b + part * bytes, 8, &w);
            gguf__add_part(type, &w, x + part, acc);
        }
        if (rest) gguf__add_ends(acc, ends, i % at_once * rest, rest);
        out[i] = gguf__fold(acc, 8);
    }
}

#ifdef GGUF__WIDE
// ---- products of many rows with 512 bits ----
// A panel is a part of 16 weight rows with the rows in the lanes of its vectors: no sum goes across lanes, and a factor
// of an activation row is one broadcast. Panels are unpacked once for up to GGUF__PANEL_ROWS activation rows.
enum { GGUF__PANEL_FROM = 8, GGUF__PANELS = 2, GGUF__PANEL_ROWS = 256, GGUF__PANEL_PARTS = 4, GGUF__BLOCK_ROWS = 16 };

typedef struct {                    // Gguf__Codes of 16 rows, transposed in words of four bytes
    int8_t w[64][64];               // word k of all rows: 8 words for each of 8 groups
    float a[8][16], b[8][16], sc[2][8][16], mn[2][8][16];
} Gguf__Panel;

// out[k] = word k of 16 rows, which are `stride` bytes apart; k < 4.
GGUF__INLINE void gguf__4_words(const void *rows, size_t stride, __m512i out[4]) {
    __m512i v[4], lo[2], hi[2];
    for (size_t i = 0; i < 4; i++) {                // v[i]: four words of rows i, 4 + i, 8 + i, 12 + i
        const char *p = (const char *)rows + i * stride;
#define GGUF__ROW(j) _mm_loadu_si128((const __m128i *)(const void *)(p + 4 * (j) * stride))
        v[i] = _mm512_castsi128_si512(GGUF__ROW(0));
        v[i] = _mm512_mask_broadcast_i32x4(v[i], 0x00f0, GGUF__ROW(1));
        v[i] = _mm512_mask_broadcast_i32x4(v[i], 0x0f00, GGUF__ROW(2));
        v[i] = _mm512_mask_broadcast_i32x4(v[i], 0xf000, GGUF__ROW(3));
#undef GGUF__ROW
    }
    for (int i = 0; i < 2; i++) {
        lo[i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
        hi[i] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
    }
    out[0] = _mm512_unpacklo_epi64(lo[0], lo[1]);
    out[1] = _mm512_unpackhi_epi64(lo[0], lo[1]);
    out[2] = _mm512_unpacklo_epi64(hi[0], hi[1]);
    out[3] = _mm512_unpackhi_epi64(hi[0], hi[1]);
}

// Q4_K: blocks are transposed before they are unpacked, which is half as much; scales as in gguf__q4_k_scales.
GGUF__INLINE void gguf__unpack_panel_q4_k(const uint8_t *b, size_t row_size, size_t n_w, Gguf__Panel *restrict p) {
    enum { BYTES = 144 };
    const __m512i low4 = _mm512_set1_epi8(15), low6 = _mm512_set1_epi8(63), bits45 = _mm512_set1_epi8(48);
    uint8_t rows[16][BYTES];
    __m512i v[4], words[2][2];                      // words: scales, minima; of groups 0 .. 3, 4 .. 7
    for (size_t i = 0; i < 16; i++) memcpy(rows[i], b + (i < n_w ? i : n_w - 1) * row_size, BYTES);
    for (int quad = 0; quad < 8; quad++) {          // words 4*(quad%2) + k of groups 2*(quad/2), and of the next
        gguf__4_words(rows[0] + 16 + 16 * quad, BYTES, v);
        for (int k = 0; k < 4; k++) {
            int8_t(*w)[64] = p->w + quad / 2 * 16 + quad % 2 * 4 + k;
            _mm512_storeu_si512(w[0], _mm512_and_si512(v[k], low4));
            _mm512_storeu_si512(w[8], _mm512_and_si512(_mm512_srli_epi16(v[k], 4), low4));
        }
    }
    gguf__4_words(rows[0], BYTES, v);
    const __m512 d = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(v[0]));
    const __m512 dmin = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(v[0], 16)));
    for (int m = 0; m < 2; m++) {
        const __m512i last = m ? _mm512_srli_epi16(v[3], 4) : v[3];
        words[m][0] = _mm512_and_si512(v[1 + m], low6);
        words[m][1] = _mm512_or_si512(_mm512_and_si512(last, low4),
                                      _mm512_and_si512(_mm512_srli_epi16(v[1 + m], 2), bits45));
    }
    for (int g = 0; g < 8; g++) {
        const __m512i byte = _mm512_set1_epi32(255);
        for (int m = 0; m < 2; m++) {
            const __m512i x = _mm512_and_si512(_mm512_srli_epi32(words[m][g / 4], 8 * (unsigned)(g % 4)), byte);
            _mm512_storeu_ps(m ? p->mn[0][g] : p->sc[0][g], _mm512_cvtepi32_ps(x));
        }
        _mm512_storeu_ps(p->a[g], d);
        _mm512_storeu_ps(p->b[g], _mm512_sub_ps(_mm512_setzero_ps(), dmin));
    }
}

// Unpacks n groups of n_w <= 16 weight rows at b; the lanes of rows beyond n_w repeat the last row. `minus` is
// subtracted from the codes.
GGUF__INLINE void gguf__unpack_panel(int type, const uint8_t *b, size_t row_size, size_t n_w, int n, int minus,
                                     Gguf__Panel *restrict p) {
    if (type == GGUF_Q4_K) {
        gguf__unpack_panel_q4_k(b, row_size, n_w, p);
        return;
    }
    const size_t end = gguf__has_min(type) ? sizeof(Gguf__Codes) : gguf__n_scales(type) ? 384 : 320;
    Gguf__Codes c[16];
    for (size_t i = 0; i < 16; i++) gguf__unpack(type, b + (i < n_w ? i : n_w - 1) * row_size, n, &c[i]);
    for (size_t at = 0; at < end; at += 16) {       // bytes of Gguf__Codes: w from 0 on, a 256, b 288, sc 320, mn 384
        __m512i v[4];
        gguf__4_words((const char *)c + at, sizeof *c, v);
        for (int k = 0; k < 4; k++) {
            if (at < 256) v[k] = _mm512_sub_epi8(v[k], _mm512_set1_epi8((char)minus));
            if (at >= 320) v[k] = _mm512_castps_si512(_mm512_cvtepi32_ps(v[k]));   // integer factors become floats
            _mm512_storeu_si512((char *)p + 16 * at + 64 * k, v[k]);
        }
    }
}

// Do the halves of a group have different factors?
GGUF__INLINE bool gguf__by_half(int type) { return gguf__n_scales(type) == 2 || type == GGUF_NVFP4; }

// What the codes have in excess: vpdpbusd multiplies unsigned by signed bytes, so codes that are still signed get 128
// added. The excess times the sum of the activations is subtracted from the sum of products.
GGUF__INLINE int gguf__excess(int type) { return gguf__is_signed(type) ? 128 : gguf__offset(type); }

typedef struct { __m512 a, b, sc[2], mn[2]; } Gguf__Factors;    // of one group of a panel

GGUF__INLINE Gguf__Factors gguf__factors(const Gguf__Panel *p, int g) {
    Gguf__Factors f;
    f.a = _mm512_loadu_ps(p->a[g]);
    f.b = _mm512_loadu_ps(p->b[g]);
    for (int h = 0; h < 2; h++) {
        f.sc[h] = _mm512_loadu_ps(p->sc[h][g]);
        f.mn[h] = _mm512_loadu_ps(p->mn[h][g]);
    }
    return f;
}

// Adds the terms of group g of 16 weight rows and one activation row. dot: sums over its halves, or over the group in
// dot[0]. Integers below 2^24 are exact in f32, so their products and sums are computed there, also with one rounding
// for a product and a sum (by_half).
GGUF__INLINE void gguf__add_lanes(int type, const Gguf__Factors *f, const Gguf__Acts *x, int g, const __m512 *dot,
                                  float *acc) {
    const int n_scales = gguf__n_scales(type);
    const __m512 scale = _mm512_set1_ps(x->scale[g]), a = _mm512_mul_ps(f->a, scale);
    __m512 term, i = dot[0], m;
    if (type == GGUF_NVFP4) {
        term = _mm512_add_ps(_mm512_mul_ps(a, i), _mm512_mul_ps(_mm512_mul_ps(f->b, scale), dot[1]));
    } else {
        if (n_scales) i = _mm512_mul_ps(i, f->sc[0]);
        if (n_scales == 2) i = _mm512_fmadd_ps(dot[1], f->sc[1], i);
        term = _mm512_mul_ps(a, i);
    }
    if (gguf__has_min(type)) {
        m = _mm512_set1_ps(x->sums[n_scales == 2 ? 0 : 2][g]);
        if (n_scales) m = _mm512_mul_ps(f->mn[0], m);
        if (n_scales == 2) m = _mm512_fmadd_ps(f->mn[1], _mm512_set1_ps(x->sums[1][g]), m);
        term = _mm512_add_ps(term, _mm512_mul_ps(_mm512_mul_ps(f->b, scale), m));
    }
    _mm512_store_ps(acc, _mm512_add_ps(_mm512_load_ps(acc), term));
}

typedef float Gguf__Sums[8][16];    // partial sums of 16 weight rows and one activation row

// n groups of a panel times n_rows activation rows, `parts` Acts apart.
GGUF__INLINE void gguf__dot_panel(int type, const Gguf__Panel *p, int n, const Gguf__Acts *x, size_t parts,
                                  size_t n_rows, Gguf__Sums *acc) {
    const int excess = gguf__excess(type), by_half = gguf__by_half(type);
    for (int g = 0; g < n; g++) {
        const Gguf__Factors f = gguf__factors(p, g);
        __m512i w[8];
        for (int k = 0; k < 8; k++) w[k] = _mm512_loadu_si512(p->w[8 * g + k]);
        for (size_t r = 0; r < n_rows; r++) {
            const Gguf__Acts *xr = x + r * parts;
            __m512i s[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
            __m512 dot[2];
            for (int k = 0; k < 8; k++) {
                int32_t word;
                memcpy(&word, xr->in_order + 32 * g + 4 * k, 4);
                s[by_half && k >= 4] = _mm512_dpbusd_epi32(s[by_half && k >= 4], w[k], _mm512_set1_epi32(word));
            }
            for (int h = 0; h <= by_half; h++) {
                dot[h] = _mm512_cvtepi32_ps(s[h]);
                if (excess)
                    dot[h] = _mm512_fnmadd_ps(_mm512_set1_ps((float)excess),
                                              _mm512_set1_ps(xr->sums[by_half ? h : 2][g]), dot[h]);
            }
            gguf__add_lanes(type, &f, xr, g, dot, acc[r][g]);
        }
    }
}

// ---- the same with AMX: registers of 16 x 64 bytes, and one instruction for 16 x 16 dot products of int8 ----
// A test defines GGUF__TILE_TWIN and the functions up to #endif in C, since few processors have the instructions.
#if defined(__x86_64__) && defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define GGUF__TILES
#endif
#if defined(GGUF__TILES) && !defined(GGUF__TILE_TWIN)
#include <cpuid.h>
#include <sys/syscall.h>

// True: the processor has the instructions, and the system lets this process use the registers.
static bool gguf__ask_for_tiles(void) {
    enum { HAS_TILES = 1 << 24, HAS_INT8 = 1 << 25, ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & HAS_TILES) || !(d & HAS_INT8)) return false;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

// Sets the sizes of the registers of this thread: 0, 1, 6, 7 results of n_rows activation rows and 16 weight rows; 2, 3
// activations, 4, 5 weights, of n codes (a multiple of 4) of each row.
static void gguf__set_tiles(size_t n_rows, size_t n) {
    struct { uint8_t palette, start_row, zero[14]; uint16_t row_bytes[16]; uint8_t rows[16]; } c = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        c.row_bytes[t] = (uint16_t)(t / 2 == 1 ? n : 64);
        c.rows[t] = (uint8_t)(t / 2 == 2 ? n / 4 : n_rows);
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(c));
}

static void gguf__release_tiles(void) { __asm__ volatile("tilerelease"); }      // the system need not save them

// n times eight products of tiles, four results in turn.
static void gguf__multiply_tiles(size_t n) {
    gguf__set_tiles(16, 64);
    for (; n > 0; n--)
        for (int i = 0; i < 2; i++)
            __asm__ volatile("tdpbssd %tmm4, %tmm2, %tmm0\n\ttdpbssd %tmm4, %tmm2, %tmm1\n\t"
                             "tdpbssd %tmm4, %tmm2, %tmm6\n\ttdpbssd %tmm4, %tmm2, %tmm7");
    gguf__release_tiles();
}

// dot[k][r][i] = sum of w*q, for k = 0, 1, over n codes of activation row r at q + k*q_step and weight row i at
// w + k*w_step. Activation rows are q_stride bytes apart; words of the weights 64 bytes, row i at byte 4*i.
static inline void gguf__dot_tiles(const int8_t *q, size_t q_stride, size_t q_step, const int8_t *w, size_t w_step,
                                   int32_t (*dot)[16][16]) {
    __asm__ volatile("tilezero %%tmm0\n\ttilezero %%tmm1\n\t"
                     "tileloadd (%0,%2,1), %%tmm2\n\ttileloadd (%3,%5,1), %%tmm4\n\t"
                     "tileloadd (%1,%2,1), %%tmm3\n\ttileloadd (%4,%5,1), %%tmm5\n\t"
                     "tdpbssd %%tmm4, %%tmm2, %%tmm0\n\ttdpbssd %%tmm5, %%tmm3, %%tmm1\n\t"
                     "tilestored %%tmm0, (%6,%5,1)\n\ttilestored %%tmm1, (%7,%5,1)"
                     : : "r"(q), "r"(q + q_step), "r"(q_stride), "r"(w), "r"(w + w_step), "r"((size_t)64), "r"(dot[0]),
                     "r"(dot[1]) : "memory");
}
#endif

#ifdef GGUF__TILES
static bool gguf__has_tiles(void) {
    static int state;                               // 0: not asked yet; 1: no; 2: yes
    int is = __atomic_load_n(&state, __ATOMIC_RELAXED);
    if (!is) {
        is = 1 + gguf__ask_for_tiles();
        __atomic_store_n(&state, is, __ATOMIC_RELAXED);
    }
    return is == 2;
}

// As gguf__dot_panel, for signed codes and n_rows <= 16, which gguf__set_tiles knows. The products of the next two
// groups (by_half: of the next group's halves) run while the terms of the last two are added.
GGUF__INLINE void gguf__dot_panel_tiles(int type, const Gguf__Panel *p, int n, const Gguf__Acts *x, size_t parts,
                                        size_t n_rows, Gguf__Sums *acc) {
    const int by_half = gguf__by_half(type), step = by_half ? 1 : 2;
    const size_t codes = by_half ? 16 : 32, stride = parts * sizeof *x;
    _Alignas(64) int32_t dots[2][2][16][16];
    gguf__dot_tiles(x->in_order, stride, codes, p->w[0], 16 * codes, dots[0]);
    for (int g = 0; g < n; g += step) {
        const int next = g + step, at = g / step % 2;
        if (next < n)
            gguf__dot_tiles(x->in_order + 32 * next, stride, codes, p->w[8 * next], 16 * codes, dots[1 - at]);
        for (int k = 0; k < step && g + k < n; k++) {
            const Gguf__Factors f = gguf__factors(p, g + k);
            for (size_t r = 0; r < n_rows; r++) {
                __m512 dot[2];
                for (int h = 0; h <= by_half; h++)
                    dot[h] = _mm512_cvtepi32_ps(_mm512_load_si512(dots[at][by_half ? h : k][r]));
                gguf__add_lanes(type, &f, x + r * parts, g + k, dot, acc[r][g + k]);
            }
        }
    }
}
#else
static bool gguf__has_tiles(void) { return false; }
#endif

// n_w <= 32 weight rows times n_rows <= GGUF__PANEL_ROWS activation rows. acc and panel are scratch.
GGUF__INLINE void gguf__dot_panels(int type, const uint8_t *b, size_t row_size, size_t n_w, const Gguf__Acts *x,
                                   size_t parts, size_t n_rows, size_t n, float *out, size_t out_stride,
                                   Gguf__Sums (*acc)[GGUF__PANEL_ROWS], Gguf__Panel (*panel)[GGUF__PANEL_PARTS]) {
    const size_t bytes = (size_t)256 / gguf__types[type].elems * gguf__types[type].bytes, n_panels = (n_w + 15) / 16;
    const bool tiles = gguf__has_tiles();
    const int minus = tiles ? gguf__offset(type) : gguf__is_signed(type) ? -128 : 0;
    size_t tile_rows = 0;
    for (size_t p = 0; p < n_panels; p++) memset(acc[p], 0, n_rows * sizeof *acc[p]);
    for (size_t part = 0; part < parts; part += GGUF__PANEL_PARTS, x += GGUF__PANEL_PARTS) {
        int groups[GGUF__PANEL_PARTS], n_parts = 0;
        for (; n_parts < GGUF__PANEL_PARTS && part + (size_t)n_parts < parts; n_parts++) {
            const size_t left = n - 256 * (part + (size_t)n_parts);
            groups[n_parts] = left < 256 ? (int)(left / 32) : 8;
            for (size_t p = 0; p < n_panels; p++)
                gguf__unpack_panel(type, b + 16 * p * row_size + (part + (size_t)n_parts) * bytes, row_size,
                                   n_w - 16 * p < 16 ? n_w - 16 * p : 16, groups[n_parts], minus, &panel[p][n_parts]);
        }
        for (size_t r = 0; r < n_rows; r += GGUF__BLOCK_ROWS) {
            const size_t rows = n_rows - r < GGUF__BLOCK_ROWS ? n_rows - r : GGUF__BLOCK_ROWS;
            const Gguf__Acts *xr = x + r * parts;
#ifdef GGUF__TILES
            if (tiles && rows != tile_rows) gguf__set_tiles(tile_rows = rows, gguf__by_half(type) ? 16 : 32);
            for (size_t p = 0; p < n_panels && tiles; p++)
                for (int j = 0; j < n_parts; j++)
                    gguf__dot_panel_tiles(type, &panel[p][j], groups[j], xr + j, parts, rows, acc[p] + r);
#endif
            for (size_t p = 0; p < n_panels && !tiles; p++)
                for (int j = 0; j < n_parts; j++)
                    gguf__dot_panel(type, &panel[p][j], groups[j], xr + j, parts, rows, acc[p] + r);
        }
    }
#ifdef GGUF__TILES
    if (tile_rows) gguf__release_tiles();
#endif
    for (size_t p = 0; p < n_panels; p++)
        for (size_t r = 0; r < n_rows; r++) {
            const size_t lanes = n_w - 16 * p < 16 ? n_w - 16 * p : 16;
            __m512 s[8];
            for (int g = 0; g < 8; g++) s[g] = _mm512_load_ps(acc[p][r][g]);
            for (int h = 4; h > 0; h /= 2)
                for (int g = 0; g < h; g++) s[g] = _mm512_add_ps(s[g], s[g + h]);
            _mm512_mask_storeu_ps(out + r * out_stride + 16 * p, (__mmask16)(0xffffu >> (16 - lanes)), s[0]);
        }
}

static void gguf__dot_all_panels(int type, const uint8_t *w, size_t row_size, size_t n_w, const Gguf__Acts *x,
                                 size_t n_rows, size_t n, float *out, size_t out_stride) {
    const size_t parts = (n + 255) / 256;
    _Alignas(64) Gguf__Sums acc[GGUF__PANELS][GGUF__PANEL_ROWS];                // 256 KiB
    _Alignas(64) Gguf__Panel panel[GGUF__PANELS][GGUF__PANEL_PARTS];            // 56 KiB
    for (size_t r = 0; r < n_rows; r += GGUF__PANEL_ROWS)
        for (size_t i = 0; i < n_w; i += 16 * GGUF__PANELS) {
            const size_t few_w = n_w - i < 16 * GGUF__PANELS ? n_w - i : 16 * GGUF__PANELS;
            const size_t rows = n_rows - r < GGUF__PANEL_ROWS ? n_rows - r : GGUF__PANEL_ROWS;
            GGUF__FOR_TYPE(type, gguf__dot_panels(T, w + i * row_size, row_size, few_w, x + r * parts, parts, rows, n,
                                                  out + r * out_stride + i, out_stride, acc, panel))
        }
}
#endif

double gguf_multiply_int8(size_t n) {
#ifdef GGUF__WIDE
#if defined(GGUF__TILES) && !defined(GGUF__TILE_TWIN)
    if (gguf__has_tiles()) {
        gguf__multiply_tiles(n);
        return (double)n * 8 * 16 * 16 * 64;
    }
#endif
    const __m512i w = _mm512_set1_epi8(1);
    __m512i s[8] = {w, w, w, w, w, w, w, w};
    for (size_t i = 0; i < n; i++)
        for (int k = 0; k < 8; k++) s[k] = _mm512_dpbusd_epi32(s[k], w, w);
    for (int k = 1; k < 8; k++) s[0] = _mm512_add_epi32(s[0], s[k]);
    volatile int32_t used = _mm512_cvtsi512_si32(s[0]);
    (void)used;
    return (double)n * 8 * 64;
#else
    (void)n;
    return 0;
#endif
}

void gguf_dot_q8_rows(int type, const void *w, size_t n_w, const void *packed, size_t n_rows, size_t n,
                      float *out, size_t out_stride) {
    const size_t row_size = gguf_row_size(type, n), parts = (n + 255) / 256;
    assert(gguf_type_supported(type) && gguf_block_elems(type) >= 32 && n % (size_t)gguf_block_elems(type) == 0);
    if (n_rows == 1) {
        const Gguf__Acts *x = (const Gguf__Acts *)packed;
        const uint8_t *b = (const uint8_t *)w;
        if (n % 256) GGUF__FOR_TYPE(type, gguf__dot_row(T, true, b, row_size, n_w, x, n, out))
        else GGUF__FOR_TYPE(type, gguf__dot_row(T, false, b, row_size, n_w, x, n, out))
        return;
    }
#ifdef GGUF__WIDE
    if (n_rows >= GGUF__PANEL_FROM) {
        gguf__dot_all_panels(type, (const uint8_t *)w, row_size, n_w, (const Gguf__Acts *)packed, n_rows, n, out,
                             out_stride);
        return;
    }
#endif
    for (size_t r = 0; r < n_rows; r += GGUF__TILE_ROWS)       // these activation rows stay in the cache
        for (size_t i = 0; i < n_w; i += GGUF__TILE_W) {
            const size_t tile_w = n_w - i < GGUF__TILE_W ? n_w - i : GGUF__TILE_W;
            const size_t tile_r = n_rows - r < GGUF__TILE_ROWS ? n_rows - r : GGUF__TILE_ROWS;
            const Gguf__Acts *x = (const Gguf__Acts *)packed + r * parts;
            GGUF__FOR_TYPE(type, gguf__dot_tile(T, (const uint8_t *)w + i * row_size, row_size, tile_w, x, parts,
                                                tile_r, n, out + r * out_stride + i, out_stride))
        }
}

// ---- quantising --------------------------------------------------------------------------------------------------
// The K types search the best scale of each sub-block, for all 8 or 16 sub-blocks of a block at once: x[i][j] is
// element i of sub-block j. Loops over j are vectorised, and each sub-block's sums run over i in order, so the result
// is the same as for one sub-block after the other, with every compiler.

// v to the nearest integer, ties to even, where |v| < 2^22; otherwise, and for a NaN, some integer.
static inline int32_t gguf__nearest(float v) {
    float shifted = v + 0x1.8p23f;                  // the last bit of the sum is worth 1
    uint32_t u;
    memcpy(&u, &shifted, 4);
    return (int32_t)(u & 0x007fffff) - 0x00400000;
}
static inline int32_t gguf__clamp(int32_t v, int32_t min, int32_t max) { return v < min ? min : v > max ? max : v; }
static inline int gguf__min(int a, int b) { return a < b ? a : b; }

// v truncated; v rounded to the nearest integer, halves away from zero. Both return 0 if the result is not an int8.
static inline int gguf__trunc(float v) { return v > -129 && v < 128 ? (int)v : 0; }
static inline int gguf__round(float v) {
    const float in = v > -128.5f && v < 127.5f ? v : 0;
    const int t = (int)in;
    return t + (in - (float)t >= 0.5f) - (in - (float)t <= -0.5f);
}

static inline void gguf__put_f16(uint8_t *p, float f) {
    uint16_t h = gguf_f32_to_f16(f);
    memcpy(p, &h, 2);
}

// The element of largest magnitude, with its sign; on ties the first.
static inline float gguf__extreme(const float *x, int n) {
    float max = 0, m = 0;
    for (int i = 0; i < n; i++)
        if (fabsf(x[i]) > max) max = fabsf(x[i]), m = x[i];
    return m;
}

static void gguf__quantize_q8_0(const float *x, uint8_t *b) {
    const float d = fabsf(gguf__extreme(x, 32)) / 127, r = d != 0 ? 1 / d : 0;
    gguf__put_f16(b, d);
    for (int i = 0; i < 32; i++) b[2 + i] = (uint8_t)gguf__round(x[i] * r);
}

// Q4_0 Q4_1 Q5_0 Q5_1. In Q4_0 and Q5_0 the value of largest magnitude becomes code 0; in Q4_1 and Q5_1 the codes span
// the range from the smallest to the largest value.
GGUF__INLINE void gguf__quantize_32(int type, const float *x, uint8_t *b) {
    const bool five = type == GGUF_Q5_0 || type == GGUF_Q5_1, has_min = gguf__has_min(type);
    const int top = five ? 31 : 15;
    float d, zero = 0, half = (float)(top / 2 + 1) + 0.5f;
    if (has_min) {
        float max = x[0];
        zero = x[0];
        half = 0.5f;
        for (int i = 1; i < 32; i++) {
            zero = x[i] < zero ? x[i] : zero;
            max = x[i] > max ? x[i] : max;
        }
        d = (max - zero) / (float)top;
    } else {
        d = gguf__extreme(x, 32) / (float)-(top / 2 + 1);
    }
    const float r = d != 0 ? 1 / d : 0;
    uint8_t c[32];
    uint32_t high = 0;
    for (int i = 0; i < 32; i++) {
        c[i] = (uint8_t)gguf__min(top, gguf__trunc((x[i] - zero) * r + half));
        high |= (uint32_t)(c[i] >> 4 & 1) << i;
    }
    gguf__put_f16(b, d);
    b += 2;
    if (has_min) {
        gguf__put_f16(b, zero);
        b += 2;
    }
    if (five) {
        memcpy(b, &high, 4);
        b += 4;
    }
    for (int i = 0; i < 16; i++) b[i] = (uint8_t)((c[i] & 15) | c[16 + i] << 4);
}

// The code whose value V[c]*h is nearest to x; on ties the first.
static inline uint8_t gguf__nearest_e2m1(float x, float h) {
    int best = 0;
    float error = fabsf(x);
    for (int c = 1; c < 16; c++) {
        const float e = fabsf(gguf__nibble_v[c] * h - x);
        best = e < error ? c : best;
        error = e < error ? e : error;
    }
    return (uint8_t)best;
}

static void gguf__quantize_mxfp4(const float *x, uint8_t *b) {
    const float max = fabsf(gguf__extreme(x, 32));
    float e = max > 0 ? floorf(log2f(max)) + 125 : 0;
    e = e > 0 ? e < 254 ? e : 254 : 0;
    b[0] = (uint8_t)e;
    const float h = gguf__e8m0_half(b[0]);
    for (int i = 0; i < 16; i++)
        b[1 + i] = (uint8_t)(gguf__nearest_e2m1(x[i], h) | gguf__nearest_e2m1(x[16 + i], h) << 4);
}

// The nearest unsigned E4M3 number, halves upwards; at most 448. Subnormals, M*2^-9, end at M = 7, also from 7.5 on.
static uint8_t gguf__to_e4m3(float v) {
    uint32_t u;
    if (!(v > 0)) return 0;
    if (v >= 448) return 0x7e;
    if (v < 0x1p-6f) return (uint8_t)gguf__min(7, (int)(v * 512 + 0.5f));
    memcpy(&u, &v, 4);
    u = (u + (1 << 19)) >> 20;                      // exponent and three bits of mantissa
    return (uint8_t)gguf__min(0x7e, (int)(u - (120 << 3)));
}

static void gguf__quantize_nvfp4(const float *x, uint8_t *b) {
    for (int j = 0; j < 4; j++, x += 16) {
        b[j] = gguf__to_e4m3(fabsf(gguf__extreme(x, 16)) / 6);
        const float h = gguf__e4m3_half(b[j]);
        for (int i = 0; i < 8; i++)
            b[4 + 8 * j + i] = (uint8_t)(gguf__nearest_e2m1(x[i], h) | gguf__nearest_e2m1(x[8 + i], h) << 4);
    }
}

// Scale and minimum of x ~ scale*code + min, code 0..top, min <= 0, for n sub-blocks of `len` elements with weights w.
// The search tries the full range, then steps + 1 ranges around it, each from the best minimum so far. A range gives
// codes, and the codes give the scale and minimum with the smallest weighted error; the best of all tries wins. Returns
// -min.
GGUF__INLINE void gguf__search_min(int n, int len, const float *restrict x, const float *restrict w, int top,
                                   float start, int steps, bool absolute, float *restrict scale, float *restrict min,
                                   int32_t *restrict code) {
    float lo[16], hi[16], s[16], m[16], sum_w[16] = {0}, sum_x[16] = {0};
    float inv[16], zero[16], best_inv[16] = {0}, best_zero[16] = {0}, best[16] = {0};
    int32_t l[256];
    for (int j = 0; j < n; j++) {
        lo[j] = x[j] < 0 ? x[j] : 0;
        hi[j] = x[j];
    }
    for (int i = 0; i < len; i++)
        GGUF__VECTOR_LOOP for (int j = 0; j < n; j++) {
            const float v = x[i * n + j], wv = w[i * n + j];
            lo[j] = v < lo[j] ? v : lo[j];
            hi[j] = v > hi[j] ? v : hi[j];
            sum_w[j] += wv;
            sum_x[j] += wv * v;
        }
    for (int k = -1; k <= steps; k++) {             // -1: the full range, whose scale and minimum are used as they are
        float sum_l[16] = {0}, sum_l2[16] = {0}, sum_xl[16] = {0}, error[16] = {0};
        for (int j = 0; j < n; j++) {
            zero[j] = k < 0 ? lo[j] : min[j];
            inv[j] = (k < 0 ? (float)top : start + 0.1f * (float)k + (float)top) / (hi[j] - zero[j]);
        }
        for (int i = 0; i < len; i++)
            GGUF__VECTOR_LOOP for (int j = 0; j < n; j++) {
                const float v = x[i * n + j], wv = w[i * n + j];
                const int32_t c = gguf__clamp(gguf__nearest(inv[j] * (v - zero[j])), 0, top);
                l[i * n + j] = c;
                sum_l[j] += wv * (float)c;
                sum_l2[j] += wv * (float)c * (float)c;
                sum_xl[j] += wv * (float)c * v;
            }
        GGUF__VECTOR_LOOP for (int j = 0; j < n; j++) {
            const float det = sum_w[j] * sum_l2[j] - sum_l[j] * sum_l[j];
            const float fit = (sum_w[j] * sum_xl[j] - sum_x[j] * sum_l[j]) / det;
            const float fit_min = (sum_l2[j] * sum_x[j] - sum_l[j] * sum_xl[j]) / det;
            s[j] = k < 0 ? 1 / inv[j] : fit_min > 0 ? sum_xl[j] / sum_l2[j] : fit;
            m[j] = k < 0 ? lo[j] : fit_min > 0 ? 0 : fit_min;
            sum_l[j] = k < 0 || det > 0;            // from here on a flag: this try is valid
        }
        for (int i = 0; i < len; i++)
            GGUF__VECTOR_LOOP for (int j = 0; j < n; j++) {
                const float diff = s[j] * (float)l[i * n + j] + m[j] - x[i * n + j];
                error[j] += w[i * n + j] * (absolute ? fabsf(diff) : diff * diff);
            }
        for (int j = 0; j < n; j++)
            if (k < 0 || (sum_l[j] != 0 && error[j] < best[j]))
                best[j] = error[j], best_inv[j] = inv[j], best_zero[j] = zero[j], scale[j] = s[j], min[j] = m[j];
    }
    for (int j = 0; j < n; j++)
        if (hi[j] == lo[j]) scale[j] = 0, min[j] = lo[j], best_inv[j] = 0;
    for (int i = 0; i < len; i++)
        for (int j = 0; j < n; j++)
            code[i * n + j] = gguf__clamp(gguf__nearest(best_inv[j] * (x[i * n + j] - best_zero[j])), 0, top);
    for (int j = 0; j < n; j++) min[j] = -min[j];
}

// Q2_K Q4_K Q5_K.
GGUF__INLINE void gguf__quantize_k_min(int type, const float *restrict src, uint8_t *restrict b) {
    const bool q2 = type == GGUF_Q2_K;
    const int n = q2 ? 16 : 8, len = 256 / n, top = q2 ? 3 : type == GGUF_Q4_K ? 15 : 31, top_scale = q2 ? 15 : 63;
    float x[256], w[256], scale[16] = {0}, min[16] = {0}, max_scale = 0, max_min = 0;
    int32_t c[256];
    for (int j = 0; j < n; j++) {
        float mean = 0;
        for (int i = 0; i < len; i++) {
            x[i * n + j] = src[j * len + i];
            mean += src[j * len + i] * src[j * len + i];
        }
        mean = q2 ? 0 : sqrtf(mean / (float)len);
        for (int i = 0; i < len; i++) w[i * n + j] = mean + fabsf(x[i * n + j]);
    }
    gguf__search_min(n, len, x, w, top, type == GGUF_Q4_K ? -1 : -0.5f, type == GGUF_Q4_K ? 20 : 15, q2, scale, min, c);
    for (int j = 0; j < n; j++) {
        max_scale = scale[j] > max_scale ? scale[j] : max_scale;
        max_min = min[j] > max_min ? min[j] : max_min;
    }
    const float inv_scale = max_scale > 0 ? (float)top_scale / max_scale : 0;
    const float inv_min = max_min > 0 ? (float)top_scale / max_min : 0;
    uint8_t sc[16], mn[16], *at_d = q2 ? b + 80 : b;
    gguf__put_f16(at_d, max_scale / (float)top_scale);
    gguf__put_f16(at_d + 2, max_min / (float)top_scale);
    const float d = gguf__f16_at(at_d), dmin = gguf__f16_at(at_d + 2);
    for (int j = 0; j < n; j++) {
        sc[j] = (uint8_t)gguf__min(top_scale, (uint8_t)gguf__nearest(inv_scale * scale[j]));
        mn[j] = (uint8_t)gguf__min(top_scale, (uint8_t)gguf__nearest(inv_min * min[j]));
    }
    for (int i = 0; i < len; i++)                   // final codes, for the rounded scales and minima
        for (int j = 0; j < n; j++) {
            const float step = d * sc[j], m = dmin * mn[j];
            if (step != 0) c[i * n + j] = gguf__clamp(gguf__nearest((x[i * n + j] + m) / step), 0, top);
        }
    if (q2) {
        for (int j = 0; j < 16; j++) b[j] = (uint8_t)(sc[j] | mn[j] << 4);
        memset(b + 16, 0, 64);
        for (int i = 0; i < 256; i++)
            b[16 + i / 128 * 32 + i % 32] |= (uint8_t)(c[i % 16 * 16 + i / 16] << (i / 32 % 4 * 2));
        return;
    }
    for (int g = 0; g < 4; g++) {
        b[4 + g] = (uint8_t)(sc[g] | sc[g + 4] >> 4 << 6);
        b[8 + g] = (uint8_t)(mn[g] | mn[g + 4] >> 4 << 6);
        b[12 + g] = (uint8_t)((sc[g + 4] & 15) | mn[g + 4] << 4);
    }
    uint8_t *h = b + 16, *q = type == GGUF_Q4_K ? b + 16 : b + 48;
    for (int i = 0; i < 128; i++) {
        const int32_t *pair = c + i % 32 * 8 + i / 32 * 2;      // element i % 32 of sub-blocks 2p and 2p + 1
        q[i] = (uint8_t)((pair[0] & 15) | pair[1] << 4);
    }
    if (type == GGUF_Q5_K)
        for (int i = 0; i < 32; i++) {
            h[i] = 0;
            for (int g = 0; g < 8; g++) h[i] |= (uint8_t)(c[i * 8 + g] >> 4 << g);
        }
}

// Q6_K: scales of 16 sub-blocks, x ~ scale*code with code -32..31 and weights x^2, the best of 19 ranges.
static void gguf__quantize_q6_k(const float *restrict src, uint8_t *restrict b) {
    float x[256], m[16], scale[16] = {0}, merit[16] = {0}, best_inv[16] = {0};
    for (int j = 0; j < 16; j++) {
        m[j] = gguf__extreme(src + 16 * j, 16);
        for (int i = 0; i < 16; i++) x[i * 16 + j] = src[j * 16 + i];
    }
    for (int k = -10; k <= 9; k++) {                // -10: the first try, at the range itself
        float inv[16], sum_xl[16] = {0}, sum_l2[16] = {0};
        if (k == 0) continue;
        GGUF__VECTOR_LOOP for (int j = 0; j < 16; j++) inv[j] = -(k == -10 ? 32 : 32 + 0.1f * (float)k) / m[j];
        for (int i = 0; i < 16; i++)
            GGUF__VECTOR_LOOP for (int j = 0; j < 16; j++) {
                const float v = x[i * 16 + j], c = (float)gguf__clamp(gguf__nearest(inv[j] * v), -32, 31);
                sum_xl[j] += v * v * v * c;
                sum_l2[j] += v * v * c * c;
            }
        for (int j = 0; j < 16; j++) {
            const bool better = k == -10 || (sum_l2[j] > 0 && sum_xl[j] * sum_xl[j] > merit[j] * sum_l2[j]);
            if (!better || fabsf(m[j]) < 1e-15f) continue;
            best_inv[j] = inv[j];
            scale[j] = sum_l2[j] != 0 ? sum_xl[j] / sum_l2[j] : 0;
            merit[j] = scale[j] * sum_xl[j];
        }
    }
    const float max = gguf__extreme(scale, 16);
    if (fabsf(max) < 1e-15f) {
        memset(b, 0, 210);
        return;
    }
    const float inv = -128 / max;
    gguf__put_f16(b + 208, 1 / inv);
    const float d = gguf__f16_at(b + 208);
    uint8_t c[256];
    for (int j = 0; j < 16; j++) {
        const int sc = gguf__min(127, gguf__nearest(inv * scale[j]));
        const float step = d * (float)sc;
        b[192 + j] = (uint8_t)sc;
        for (int i = 0; i < 16; i++) {              // a sub-block with a scale of 0 keeps the codes of the search
            const float v = step != 0 ? src[16 * j + i] / step : src[16 * j + i] * best_inv[j];
            c[16 * j + i] = best_inv[j] == 0 && step == 0 ? 0 : (uint8_t)(gguf__clamp(gguf__nearest(v), -32, 31) + 32);
        }
    }
    for (int h = 0; h < 2; h++)
        for (int l = 0; l < 32; l++) {
            const uint8_t *p = c + 128 * h + l;
            b[64 * h + l] = (uint8_t)((p[0] & 15) | p[64] << 4);
            b[64 * h + 32 + l] = (uint8_t)((p[32] & 15) | p[96] << 4);
            b[128 + 32 * h + l] = (uint8_t)(p[0] >> 4 | p[32] >> 4 << 2 | p[64] >> 4 << 4 | p[96] >> 4 << 6);
        }
}

// Q3_K: scales of 16 sub-blocks, x ~ scale*code with code -4..3 and weights x^2. Starts from the codes of the full
// range; then five sweeps change each element's code to the best one for the scale that fits the other elements.
static void gguf__quantize_q3_k(const float *restrict src, uint8_t *restrict b) {
    int32_t c[256];
    float scale[16];
    for (int j = 0; j < 16; j++) {
        const float *x = src + 16 * j, m = gguf__extreme(x, 16), inv = -4 / m;
        float sum_xl = 0, sum_l2 = 0;
        int32_t *cj = c + 16 * j;
        scale[j] = 0;
        memset(cj, 0, 16 * sizeof *cj);
        if (fabsf(m) < 1e-15f) continue;
        for (int i = 0; i < 16; i++) {
            const float w = x[i] * x[i];
            cj[i] = gguf__clamp(gguf__nearest(inv * x[i]), -4, 3);
            sum_xl += w * x[i] * (float)cj[i];
            sum_l2 += w * (float)cj[i] * (float)cj[i];
        }
        for (int sweep = 0; sweep < 5; sweep++)
            for (int i = 0; i < 16; i++) {
                const float w = x[i] * x[i], xl = sum_xl - w * x[i] * (float)cj[i];
                const float l2 = sum_l2 - w * (float)cj[i] * (float)cj[i];
                if (!(xl > 0)) continue;
                const int32_t l = gguf__clamp(gguf__nearest(x[i] * l2 / xl), -4, 3);
                const float new_xl = xl + w * x[i] * (float)l, new_l2 = l2 + w * (float)l * (float)l;
                if (l == cj[i] || !(new_l2 > 0) || !(new_xl * new_xl * sum_l2 > sum_xl * sum_xl * new_l2)) continue;
                cj[i] = l;
                sum_xl = new_xl;
                sum_l2 = new_l2;
            }
        scale[j] = sum_l2 > 0 ? sum_xl / sum_l2 : 0;
        for (int i = 0; i < 16; i++) cj[i] += 4;
    }
    const float max = gguf__extreme(scale, 16), inv = max != 0 ? -32 / max : 0;
    gguf__put_f16(b + 108, max != 0 ? 1 / inv : 0);
    const float d = gguf__f16_at(b + 108);
    memset(b, 0, 108);
    for (int j = 0; j < 16; j++) {
        const int sc = gguf__clamp(gguf__nearest(inv * scale[j]), -32, 31) + 32;
        const float step = d * (float)(sc - 32);
        if (max != 0) {
            b[96 + j % 8] |= (uint8_t)((sc & 15) << (j / 8 * 4));
            b[104 + j % 4] |= (uint8_t)(sc >> 4 << (j / 4 * 2));
        }
        for (int i = 16 * j; i < 16 * j + 16; i++) {
            if (step != 0) c[i] = gguf__clamp(gguf__nearest(src[i] / step), -4, 3) + 4;
            b[32 + i / 128 * 32 + i % 32] |= (uint8_t)((c[i] & 3) << (i / 32 % 4 * 2));
            b[i % 32] |= (uint8_t)(c[i] >> 2 << (i / 32));
        }
    }
}

// The code whose value T[c] is nearest to v; on ties the larger.
static inline int gguf__nearest_t(float v) {
    int c = 0;
    for (int i = 1; i < 16; i++) c += v - gguf__nibble_t[i - 1] >= gguf__nibble_t[i] - v;
    return c;
}

// Scale of x ~ scale*T[code] for 32 elements with weights x^2. The search maps the value of largest magnitude to the
// end of the table, then to `tries` entries on each side of it, each with the scale that fits its codes best. code: the
// codes of the first try.
static float gguf__search_t(const float *x, int tries, uint8_t *code) {
    const float m = gguf__extreme(x, 32);
    float best = 0, scale = 0;
    memset(code, 0, 32);
    if (fabsf(m) < 1e-15f) return 0;
    for (int k = -tries - 1; k <= tries; k++) {         // -tries - 1: the first try
        const bool first = k < -tries;
        const float inv = first ? 1 / ((tries ? -m : m) / gguf__nibble_t[0]) : (float)(k + gguf__nibble_t[0]) / m;
        float sum_xt = 0, sum_t2 = 0;
        for (int i = 0; i < 32; i++) {
            const int c = gguf__nearest_t(inv * x[i]);
            const float t = gguf__nibble_t[c], w = x[i] * x[i];
            if (first) code[i] = (uint8_t)c;
            sum_xt += w * t * x[i];
            sum_t2 += w * t * t;
        }
        if (first || (sum_t2 > 0 && sum_xt * sum_xt > best * sum_t2)) {
            scale = sum_xt / sum_t2;
            best = scale * sum_xt;
        }
        if (!tries) break;
    }
    return scale;
}

static void gguf__put_nibbles(const uint8_t *c, uint8_t *b) {
    for (int i = 0; i < 16; i++) b[i] = (uint8_t)(c[i] | c[16 + i] << 4);
}

// IQ4_NL: a single try, the value of largest magnitude at T[0].
static void gguf__quantize_iq4_nl(const float *x, uint8_t *b) {
    uint8_t c[32];
    gguf__put_f16(b, gguf__search_t(x, 0, c));
    gguf__put_nibbles(c, b + 2);
}

// IQ4_XS: eight integer scales; the one of largest magnitude becomes -32.
static void gguf__quantize_iq4_xs(const float *x, uint8_t *b) {
    float scale[8];
    uint8_t c[32];
    for (int g = 0; g < 8; g++) scale[g] = gguf__search_t(x + 32 * g, 7, c);
    const float d = -gguf__extreme(scale, 8) / 32, inv = d != 0 ? 1 / d : 0;
    memset(b, 0, 8);
    gguf__put_f16(b, d);
    for (int g = 0; g < 8; g++) {
        const int sc = gguf__clamp(gguf__nearest(inv * scale[g]), -32, 31);
        const float step = d * (float)sc, inv_step = step != 0 ? 1 / step : 0;
        for (int i = 0; i < 32; i++) c[i] = (uint8_t)gguf__nearest_t(inv_step * x[32 * g + i]);
        gguf__put_nibbles(c, b + 8 + 16 * g);
        b[2 + g / 4] |= (uint8_t)((sc + 32) >> 4 << (g % 4 * 2));
        b[4 + g / 2] |= (uint8_t)(((sc + 32) & 15) << (g % 2 * 4));
    }
}


void gguf_quantize(int type, const float *src, void *dst, size_t n) {
    const size_t elems = (size_t)gguf_block_elems(type), bytes = (size_t)gguf_block_bytes(type);
    uint8_t *b = (uint8_t *)dst;
    assert(gguf_type_supported(type) && n % elems == 0);
    if (type == GGUF_F32 && n > 0) memcpy(dst, src, n * sizeof *src);
    else for (; n > 0; n -= elems, src += elems, b += bytes) {
        uint16_t h;
        switch (type) {
        case GGUF_F16: h = gguf_f32_to_f16(*src), memcpy(b, &h, 2); break;
        case GGUF_BF16: h = gguf_f32_to_bf16(*src), memcpy(b, &h, 2); break;
        case GGUF_Q8_0: gguf__quantize_q8_0(src, b); break;
        case GGUF_Q4_0: gguf__quantize_32(GGUF_Q4_0, src, b); break;
        case GGUF_Q4_1: gguf__quantize_32(GGUF_Q4_1, src, b); break;
        case GGUF_Q5_0: gguf__quantize_32(GGUF_Q5_0, src, b); break;
        case GGUF_Q5_1: gguf__quantize_32(GGUF_Q5_1, src, b); break;
        case GGUF_IQ4_NL: gguf__quantize_iq4_nl(src, b); break;
        case GGUF_IQ4_XS: gguf__quantize_iq4_xs(src, b); break;
        case GGUF_MXFP4: gguf__quantize_mxfp4(src, b); break;
        case GGUF_NVFP4: gguf__quantize_nvfp4(src, b); break;
        case GGUF_Q2_K: gguf__quantize_k_min(GGUF_Q2_K, src, b); break;
        case GGUF_Q3_K: gguf__quantize_q3_k(src, b); break;
        case GGUF_Q4_K: gguf__quantize_k_min(GGUF_Q4_K, src, b); break;
        case GGUF_Q5_K: gguf__quantize_k_min(GGUF_Q5_K, src, b); break;
        case GGUF_Q6_K: gguf__quantize_q6_k(src, b); break;
        }
    }
}
#endif // GGUF_IMPLEMENTATION
