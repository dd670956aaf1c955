// The copies of csrc/wire_copy.h run by the host, block after block and thread after thread.
#include "wire_copy.h"

template <int kWireItem>
static void run(const wire::Piece* pieces, int64_t count, char* slot, uint64_t* sums, bool gather) {
  for (int64_t i = 0; i < count; ++i) {
    const wire::Piece& p = pieces[i];
    for (int64_t begin = 0; begin < p.nbytes; begin += wire::kChunk) {
      const int64_t end = p.nbytes < begin + wire::kChunk ? p.nbytes : begin + wire::kChunk;
      for (int t = 0; t < wire::kThreads; ++t)
        if (gather) sums[p.tensor] += wire::gather_share<kWireItem>(p, begin, end, t, slot);
        else wire::scatter_share<kWireItem>(p, begin, end, t, slot);
      for (int t = 0; t < wire::kThreads; ++t)
        if (!gather) sums[p.tensor] += wire::check_share<kWireItem>(p, begin, end, t);
    }
  }
}

extern "C" void wire_copy(const void* pieces, int64_t count, void* slot, void* sums, int64_t wire_item, int gather) {
  (wire_item == 2 ? run<2> : run<4>)(static_cast<const wire::Piece*>(pieces), count, static_cast<char*>(slot),
                                     static_cast<uint64_t*>(sums), gather);
}
