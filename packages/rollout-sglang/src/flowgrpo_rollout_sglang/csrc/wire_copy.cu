// Gather: many tensors, cast, into one slot. Scatter: one slot into many tensors, read back. One launch each, with the
// fingerprint of every tensor in the same launch. Reference: wire/host.py and wire/fingerprint.py; sums are of integers
// mod 2^64, so they do not depend on the order of blocks.
//
// Bound by memory: a gather reads and writes each byte once, a scatter also reads it again, mostly from the L2 cache.

#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include "wire_copy.h"

namespace {

using torch::stable::Tensor;
using wire::Piece;

// The piece that block `chunk` works on: the last one that starts at or before it.
__device__ const Piece& piece_of(const Piece* pieces, int count, int64_t chunk) {
  int low = 0, high = count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (pieces[middle].first_chunk <= chunk) low = middle;
    else high = middle - 1;
  }
  return pieces[low];
}

__device__ void add_to(unsigned long long* sum, uint64_t part) {
  __shared__ uint64_t warps[wire::kThreads / 32];
#pragma unroll
  for (int lane = 16; lane; lane /= 2) part += __shfl_down_sync(0xFFFFFFFFu, part, lane);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = part;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < wire::kThreads / 32; ++w) part += warps[w];
    atomicAdd(sum, static_cast<unsigned long long>(part));
  }
}

template <int kWireItem, bool kGather>
__global__ void __launch_bounds__(wire::kThreads) copy_kernel(
    const Piece* pieces, int count, char* slot, unsigned long long* sums) {
  __shared__ Piece shared;
  if (threadIdx.x == 0) shared = piece_of(pieces, count, blockIdx.x);
  __syncthreads();
  const Piece p = shared;
  const int64_t begin = (blockIdx.x - p.first_chunk) * wire::kChunk;
  const int64_t end = min(p.nbytes, begin + wire::kChunk);
  uint64_t part;
  if (kGather) {
    part = wire::gather_share<kWireItem>(p, begin, end, threadIdx.x, slot);
  } else {
    wire::scatter_share<kWireItem>(p, begin, end, threadIdx.x, slot);
    __syncthreads();
    part = wire::check_share<kWireItem>(p, begin, end, threadIdx.x);
  }
  add_to(sums + p.tensor, part);
}

// pieces: [count, 9] int64 rows of wire::Piece; sums: [tensors] int64, added to; both on the slot's GPU.
// slot: its address; chunks: blocks of all pieces; wire_item: 2 for bfloat16 on the wire, 4 for float32.
template <bool kGather>
void launch(Tensor pieces, Tensor sums, int64_t slot, int64_t chunks, int64_t wire_item, int64_t stream) {
  STD_TORCH_CHECK(pieces.is_cuda() && sums.is_cuda(), "pieces and sums must be CUDA tensors");
  STD_TORCH_CHECK(pieces.dim() == 2 && pieces.size(1) * 8 == sizeof(Piece), "pieces must be [count, 9] int64");
  STD_TORCH_CHECK(slot % 16 == 0, "a slot must be aligned to 16 bytes");
  STD_TORCH_CHECK(wire_item == 2 || wire_item == 4, "wire_item must be 2 or 4, got ", wire_item);
  STD_TORCH_CHECK(chunks > 0 && chunks < (int64_t{1} << 31), "chunks must be from 1 to 2^31 - 1, got ", chunks);
  const auto kernel = wire_item == 2 ? copy_kernel<2, kGather> : copy_kernel<4, kGather>;
  kernel<<<static_cast<unsigned>(chunks), wire::kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(
      static_cast<const Piece*>(pieces.data_ptr()), static_cast<int>(pieces.size(0)),
      reinterpret_cast<char*>(slot), static_cast<unsigned long long*>(sums.data_ptr()));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

STABLE_TORCH_LIBRARY(flowgrpo_wire, m) {
  const char* arguments = "(Tensor pieces, Tensor(a!) sums, int slot, int chunks, int wire_item, int stream) -> ()";
  m.def((std::string("gather") + arguments).c_str());
  m.def((std::string("scatter") + arguments).c_str());
}

STABLE_TORCH_LIBRARY_IMPL(flowgrpo_wire, CUDA, m) {
  m.impl("gather", TORCH_BOX(&launch<true>));
  m.impl("scatter", TORCH_BOX(&launch<false>));
}
