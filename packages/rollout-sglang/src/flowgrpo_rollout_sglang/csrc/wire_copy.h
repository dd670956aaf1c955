// The two copies of a weight sync, for one thread of a block. Compiled by nvcc into the kernels of wire_copy.cu, and by
// a host compiler into a test, so that the index arithmetic is tested on machines without a GPU.
//
// Wire bytes of a tensor are handled in 16-byte vectors. The slot side is always aligned to 16. The tensor side may have
// any alignment that its elements allow, another dtype than the wire, and rows that do not lie together.

#pragma once
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#define WIRE_FN __host__ __device__ __forceinline__
#else
#define WIRE_FN inline
#endif

namespace wire {

constexpr int64_t kChunk = 64 * 1024;  // wire bytes that one block copies
constexpr int kThreads = 256;
constexpr int kBatch = 4;  // vectors in flight for each thread

enum Kind : int64_t {
  kSame = 0,      // the tensor has the wire's dtype
  kFloatMem = 1,  // float32 in memory, bfloat16 on the wire
  kBf16Mem = 2,   // bfloat16 in memory, float32 on the wire
};

// One row of the table that the host writes: a piece of one tensor in one bucket.
struct Piece {
  int64_t pointer;      // first element of the tensor
  int64_t start;        // first wire byte of the piece within the tensor; a multiple of 128
  int64_t nbytes;       // wire bytes of the piece
  int64_t offset;       // first byte of the piece within the slot; a multiple of 128
  int64_t tensor;       // which sum its fingerprint is added to
  int64_t kind;         // Kind
  int64_t row_elems;    // elements that lie together; 0: all of them
  int64_t row_stride;   // elements from one row to the next
  int64_t first_chunk;  // blocks before this piece
};

struct alignas(16) Vec {
  uint32_t w[4];
};

// MurmurHash3's finaliser (public domain), of a position counted from 1: see wire/fingerprint.py.
WIRE_FN uint32_t key(uint32_t word) {
  uint32_t x = word + 1u;
  x ^= x >> 16;
  x *= 0x85EBCA6Bu;
  x ^= x >> 13;
  x *= 0xC2B2AE35u;
  return x ^ (x >> 16);
}

WIRE_FN uint64_t terms(const Vec& v, uint32_t word) {
  uint64_t sum = 0;
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) sum += static_cast<uint64_t>(v.w[i]) * key(word + i);
  return sum;
}

// Past the first-level cache: what is read back must be what was written.
WIRE_FN Vec load(const char* p) {
#ifdef __CUDA_ARCH__
  const uint4 q = __ldcg(reinterpret_cast<const uint4*>(p));
  return Vec{{q.x, q.y, q.z, q.w}};
#else
  Vec v;
  std::memcpy(&v, p, 16);
  return v;
#endif
}

WIRE_FN void store(char* p, const Vec& v) {
#ifdef __CUDA_ARCH__
  *reinterpret_cast<uint4*>(p) = make_uint4(v.w[0], v.w[1], v.w[2], v.w[3]);
#else
  std::memcpy(p, &v, 16);
#endif
}

WIRE_FN Vec keep(Vec v, int valid) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int left = valid - 4 * i;
    if (left <= 0) v.w[i] = 0;
    else if (left < 4) v.w[i] &= 0xFFFFFFFFu >> (8 * (4 - left));
  }
  return v;
}

// `valid` bytes (1 to 16) from any address, the rest zero. Reads only 16-byte words that hold a valid byte.
WIRE_FN Vec load_bytes(const char* p, int valid) {
  const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(p) & 15);
  const char* base = p - shift;
  Vec lo = load(base);
  if (shift != 0) {
    Vec hi{{0, 0, 0, 0}};
    if (shift + valid > 16) hi = load(base + 16);
    const uint64_t a0 = lo.w[0] | static_cast<uint64_t>(lo.w[1]) << 32;
    const uint64_t a1 = lo.w[2] | static_cast<uint64_t>(lo.w[3]) << 32;
    const uint64_t b0 = hi.w[0] | static_cast<uint64_t>(hi.w[1]) << 32;
    const uint64_t b1 = hi.w[2] | static_cast<uint64_t>(hi.w[3]) << 32;
    const int bits = 8 * (shift & 7);
    const uint64_t c0 = shift < 8 ? a0 : a1, c1 = shift < 8 ? a1 : b0, c2 = shift < 8 ? b0 : b1;
    const uint64_t r0 = bits ? c0 >> bits | c1 << (64 - bits) : c0;
    const uint64_t r1 = bits ? c1 >> bits | c2 << (64 - bits) : c1;
    lo = Vec{{static_cast<uint32_t>(r0), static_cast<uint32_t>(r0 >> 32), static_cast<uint32_t>(r1),
              static_cast<uint32_t>(r1 >> 32)}};
  }
  return valid < 16 ? keep(lo, valid) : lo;
}

// Two float32 (as bits) rounded to bfloat16, to nearest even; NaN becomes 0x7FFF as in torch on CUDA.
WIRE_FN uint32_t to_bf16x2(uint32_t first, uint32_t second) {
#ifdef __CUDA_ARCH__
  const __nv_bfloat162 pair = __floats2bfloat162_rn(__uint_as_float(first), __uint_as_float(second));
  return *reinterpret_cast<const uint32_t*>(&pair);
#else
  auto one = [](uint32_t u) -> uint32_t {
    if ((u & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFFu;
    return (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  };
  return one(first) | one(second) << 16;
#endif
}

WIRE_FN Vec narrow(const Vec& a, const Vec& b) {
  return Vec{{to_bf16x2(a.w[0], a.w[1]), to_bf16x2(a.w[2], a.w[3]), to_bf16x2(b.w[0], b.w[1]),
              to_bf16x2(b.w[2], b.w[3])}};
}

WIRE_FN Vec widen(uint32_t first, uint32_t second) {
  return Vec{{first << 16, first & 0xFFFF0000u, second << 16, second & 0xFFFF0000u}};
}

template <int kWireItem>
WIRE_FN int64_t memory_item(const Piece& p) {
  return p.kind == kSame ? kWireItem : p.kind == kFloatMem ? 4 : 2;
}

// Address of the element that wire byte `at` of the tensor belongs to.
template <int kWireItem>
WIRE_FN char* address(const Piece& p, int64_t at) {
  int64_t e = at / kWireItem;
  if (p.row_elems) e = e / p.row_elems * p.row_stride + e % p.row_elems;
  return reinterpret_cast<char*>(p.pointer) + e * memory_item<kWireItem>(p);
}

// Whether every full vector lies in one row at an address aligned to 16.
template <int kWireItem>
WIRE_FN bool vectors_fit(const Piece& p) {
  const int64_t item = memory_item<kWireItem>(p);
  if (p.pointer % 16 || p.kind == kBf16Mem) return false;
  return !p.row_elems || (p.row_elems % (16 / kWireItem) == 0 && p.row_stride * item % 16 == 0);
}

// The wire bytes [at, at + valid) of the tensor, the rest of the vector zero. Any alignment, any rows.
template <int kWireItem>
WIRE_FN Vec read_any(const Piece& p, int64_t at, int valid) {
  Vec v{{0, 0, 0, 0}};
  if (!p.row_elems) {
    const char* from = address<kWireItem>(p, at);
    if (p.kind == kSame) return load_bytes(from, valid);
    if (p.kind == kBf16Mem) {
      v = load_bytes(from, valid / 2);
      return widen(v.w[0], v.w[1]);
    }
    const int bytes = 2 * valid;
    const Vec second = bytes > 16 ? load_bytes(from + 16, bytes - 16) : v;
    return narrow(load_bytes(from, bytes < 16 ? bytes : 16), second);
  }
  for (int i = 0; i < valid; i += kWireItem) {
    const Vec one = load_bytes(address<kWireItem>(p, at + i), static_cast<int>(memory_item<kWireItem>(p)));
    uint32_t bits = one.w[0];
    if (p.kind == kFloatMem) bits = to_bf16x2(bits, 0);
    if (p.kind == kBf16Mem) bits <<= 16;
    v.w[i / 4] |= bits << (8 * (i % 4));
  }
  return v;
}

// Writes those bytes, element by element.
template <int kWireItem>
WIRE_FN void write_any(const Piece& p, int64_t at, int valid, const Vec& v) {
  for (int i = 0; i < valid; i += kWireItem) {
    char* to = address<kWireItem>(p, at + i);
    const uint32_t bits = v.w[i / 4] >> (8 * (i % 4));
    if (kWireItem == 4) *reinterpret_cast<uint32_t*>(to) = bits;
    else if (p.kind == kFloatMem) *reinterpret_cast<uint32_t*>(to) = bits << 16;
    else *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(bits);
  }
}

// A full vector where vectors_fit.
template <int kWireItem>
WIRE_FN Vec read_fit(const Piece& p, int64_t at) {
  const char* from = address<kWireItem>(p, at);
  return p.kind == kSame ? load(from) : narrow(load(from), load(from + 16));
}

template <int kWireItem>
WIRE_FN void write_fit(const Piece& p, int64_t at, const Vec& v) {
  char* to = address<kWireItem>(p, at);
  if (p.kind == kSame) return store(to, v);
  store(to, widen(v.w[0], v.w[1]));
  store(to + 16, widen(v.w[2], v.w[3]));
}

// One thread's share of the piece's bytes [begin, end), begin a multiple of 16: `step(first, count)` for up to kBatch
// full vectors that are kThreads apart, then `rest(at, valid)` for what is left. All loads of a step may be in flight.
template <typename Step, typename Rest>
WIRE_FN void for_share(int64_t begin, int64_t end, int thread, bool fit, Step step, Rest rest) {
  const int64_t full = fit ? begin + (end - begin) / 16 * 16 : begin;
  constexpr int64_t stride = 16 * kThreads;
  int64_t at = begin + 16 * thread;
  for (; at + (kBatch - 1) * stride < full; at += kBatch * stride) step(at, kBatch);
  for (; at < full; at += stride) step(at, 1);
  for (; at < end; at += stride) rest(at, end - at < 16 ? static_cast<int>(end - at) : 16);
}

// Tensor to slot. Returns this thread's part of the fingerprint of what it packed.
template <int kWireItem>
WIRE_FN uint64_t gather_share(const Piece& p, int64_t begin, int64_t end, int thread, char* slot) {
  uint64_t sum = 0;
  char* out = slot + p.offset;
  for_share(
      begin, end, thread, vectors_fit<kWireItem>(p),
      [&](int64_t at, int count) {
        Vec v[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
          if (i < count) v[i] = read_fit<kWireItem>(p, p.start + at + 16 * kThreads * i);
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
          if (i < count) {
            const int64_t byte = at + 16 * kThreads * i;
            store(out + byte, v[i]);
            sum += terms(v[i], static_cast<uint32_t>((p.start + byte) / 4));
          }
      },
      [&](int64_t at, int valid) {
        const Vec v = read_any<kWireItem>(p, p.start + at, valid);
        store(out + at, v);
        sum += terms(v, static_cast<uint32_t>((p.start + at) / 4));
      });
  return sum;
}

// Slot to tensor.
template <int kWireItem>
WIRE_FN void scatter_share(const Piece& p, int64_t begin, int64_t end, int thread, const char* slot) {
  const char* in = slot + p.offset;
  for_share(
      begin, end, thread, vectors_fit<kWireItem>(p),
      [&](int64_t at, int count) {
        Vec v[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
          if (i < count) v[i] = load(in + at + 16 * kThreads * i);
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
          if (i < count) write_fit<kWireItem>(p, p.start + at + 16 * kThreads * i, v[i]);
      },
      [&](int64_t at, int valid) { write_any<kWireItem>(p, p.start + at, valid, load(in + at)); });
}

// The fingerprint of what the tensor holds.
template <int kWireItem>
WIRE_FN uint64_t check_share(const Piece& p, int64_t begin, int64_t end, int thread) {
  uint64_t sum = 0;
  for_share(
      begin, end, thread, vectors_fit<kWireItem>(p),
      [&](int64_t at, int count) {
        Vec v[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
          if (i < count) v[i] = read_fit<kWireItem>(p, p.start + at + 16 * kThreads * i);
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
          if (i < count) sum += terms(v[i], static_cast<uint32_t>((p.start + at) / 4 + 4 * kThreads * i));
      },
      [&](int64_t at, int valid) {
        sum += terms(read_any<kWireItem>(p, p.start + at, valid), static_cast<uint32_t>((p.start + at) / 4));
      });
  return sum;
}

}  // namespace wire
