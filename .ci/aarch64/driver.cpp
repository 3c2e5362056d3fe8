// Runs kernels for another process: reads calls from stdin, with the memory that they point to, and writes it back.
//
// A call is four 64-bit numbers (function, bytes of its argument, regions of memory, pointers in the argument), the
// argument, (address, bytes) of each region, the offset of each pointer in the argument, and the regions. The answer is
// the 64-bit result of the function and the regions.

#include <cstdio>

#include "kernels.cpp"

using Bytes = std::vector<char>;
struct Region {
  uint64_t address, bytes;
};

template <int (*FUNCTION)(const hla::Call*)>
static int64_t call(const void* argument) {
  return FUNCTION(static_cast<const hla::Call*>(argument));
}
static int64_t lanes(const void*) { return hla_lanes(); }
static int64_t call_bytes(const void*) { return hla_call_bytes(); }

// In the order of FUNCTIONS in emulated_kernels.py.
static int64_t (*const functions[])(const void*) = {
    lanes,
    call_bytes,
    call<hla_bidirectional>,
    call<hla_causal>,
    call<hla_bidirectional_backward>,
    call<hla_causal_backward>,
    call<hla_windowed>,
    call<hla_windowed_step>,
    call<hla_windowed_backward>,
};

template <typename T>
static bool read(T* to, size_t count) {
  return fread(to, sizeof(T), count, stdin) == count;
}

int main() {
  uint64_t header[4];
  while (read(header, 4)) {
    std::vector<uint64_t> argument((header[1] + 7) / 8), pointers(header[3]);
    std::vector<Region> regions(header[2]);
    if (!read(reinterpret_cast<char*>(argument.data()), header[1]) || !read(regions.data(), regions.size()) ||
        !read(pointers.data(), pointers.size()))
      return 1;
    std::vector<Bytes> memory;
    for (const Region& region : regions) {
      memory.emplace_back(region.bytes);
      if (!read(memory.back().data(), region.bytes)) return 1;
    }
    for (uint64_t offset : pointers) {
      uint64_t& pointer = argument[offset / 8];
      size_t i = 0;
      while (i < regions.size() && pointer - regions[i].address >= regions[i].bytes) ++i;
      if (i == regions.size()) return 2;
      pointer = reinterpret_cast<uint64_t>(memory[i].data()) + (pointer - regions[i].address);
    }
    const int64_t result = functions[header[0]](argument.data());
    fwrite(&result, 8, 1, stdout);
    for (const Bytes& bytes : memory) fwrite(bytes.data(), 1, bytes.size(), stdout);
    fflush(stdout);
  }
}
