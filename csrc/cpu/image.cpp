#include "cpu/image.h"

#include <vector>

#include "core/image/rows.h"
#include "core/work.h"
#include "cpu/instruction_sets.h"
#include "cpu/parallel_for.h"

namespace pyparallel::cpu {
namespace {

template <typename Cpu, typename Source, typename Value, bool exact>
void convert(void* to, const void* from, int64_t num, const Pattern& pattern) {
  Cpu::run([&]() PP_INLINED {
    convert_loop<Source, Value, exact, typename Cpu::Math>(to, from, num, pattern);
  });
}

template <typename Cpu, typename Source>
void copy_strided(void* to, const void* from, int64_t num, int64_t step) {
  Cpu::run([&]() PP_INLINED { copy_strided_loop<Source>(to, from, num, step); });
}

template <typename Cpu, typename Source>
void interleave(void* to, const void* from, int64_t num, int64_t channels,
                int64_t next_column, int64_t next_channel) {
  Cpu::run([&]() PP_INLINED {
    interleave_loop<Source>(to, from, num, channels, next_column, next_channel);
  });
}

template <typename Cpu>
ImageLoops make_loops(const ImageJob& job) {
  return visit_types(job, [&](auto source, auto value) {
    using Source = decltype(source);
    using Value = decltype(value);
    return ImageLoops{job.exact ? &convert<Cpu, Source, Value, true>
                                : &convert<Cpu, Source, Value, false>,
                      &copy_strided<Cpu, Source>, &interleave<Cpu, Source>};
  });
}

ImageTypes make_types(const ImageJob& job) {
  return visit_types(job, [&](auto source, auto value) {
    ImageTypes types{sizeof(source), sizeof(value), {}};
    for (int c = 0; c < job.batch.channels; ++c) {
      const auto fill = HostMath::round(job.batch.levels.fill[c], value);
      memcpy(&types.fills[c], &fill, sizeof(fill));
    }
    return types;
  });
}

using MakeLoops = ImageLoops (*)(const ImageJob& job);

// Returns the variants for this CPU, the fastest first.
std::vector<MakeLoops> find_variants() {
  std::vector<MakeLoops> variants;
  visit_cpus([&](auto cpu) { variants.push_back(&make_loops<decltype(cpu)>); });
  return variants;
}

const std::vector<MakeLoops>& variants() {
  static const std::vector<MakeLoops> found = find_variants();
  return found;
}

}  // namespace

size_t num_image_variants() { return variants().size(); }

void image_batch(ImageJob job, size_t variant) {
  cut_rows(&job.batch, job.batch.width);
  const ImageRows body{job.batch, make_types(job), variants()[variant](job), job.last};
  const int64_t rows = num_pieces(job.batch);
  const int64_t workers = num_workers(num_bytes(job));
  parallel_for(workers, [&](int64_t worker) {
    body(partition(rows, workers, worker), Lane{0, 1});
  });
}

}  // namespace pyparallel::cpu
