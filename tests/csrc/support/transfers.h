// Batches for the fake device, and their expected bytes.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "core/pack.h"
#include "cpu/launch.h"
#include "fake_runtime.h"
#include "transfer/engine.h"

namespace fake {

using pyparallel::Slot;
using pyparallel::transfer::Engine;
using pyparallel::transfer::Job;
using pyparallel::transfer::Limits;
using pyparallel::transfer::SendResult;
using Bytes = std::vector<uint8_t>;

// The runtime of a test.
inline Runtime* now = nullptr;

inline void pack(const pyparallel::Pack& body) {
  now->check_unread(body.dst, body.end);
  pyparallel::cpu::pack(body);
}

constexpr Stream kCopies{Runtime::kCopies, 0};
constexpr Stream kHome{1, 0};
constexpr Stream kOther{2, 0};

// Leaves of random sizes, up to `largest` bytes, with gaps between them.
struct Batch {
  Batch(Random* random, int64_t num_leaves, int64_t largest, int64_t num_direct = 0) {
    for (int64_t i = 0; i < num_leaves; ++i) {
      leaves.push_back(bytes(random, random->between(0, largest)));
      const auto offset = static_cast<int64_t>(packed.size());
      const Bytes& leaf = leaves.back();
      slots.push_back({leaf.empty() ? nullptr : leaf.data(), offset,
                       static_cast<int64_t>(leaf.size())});
      packed.insert(packed.end(), leaf.begin(), leaf.end());
      packed.resize((packed.size() + 63) / 64 * 64);
    }
    for (int64_t i = 0; i < num_direct; ++i) {
      sources.push_back(bytes(random, random->between(1, largest)));
    }
  }

  // The expected bytes: the slab, then each direct copy.
  std::vector<Bytes> expected() const {
    std::vector<Bytes> all{packed};
    all.insert(all.end(), sources.begin(), sources.end());
    return all;
  }

  // Overwrites the leaves, as a program that reuses its memory.
  void overwrite_leaves() {
    for (Bytes& leaf : leaves) leaf.assign(leaf.size(), 0x11);
  }

  std::vector<Bytes> leaves;
  std::vector<Slot> slots;
  Bytes packed;
  std::vector<Bytes> sources;

 private:
  static Bytes bytes(Random* random, int64_t num) {
    Bytes made(static_cast<size_t>(num));
    for (uint8_t& byte : made) byte = static_cast<uint8_t>(random->next());
    return made;
  }
};

// Memory of the device for one batch, and the job that fills it.
struct Target {
  explicit Target(const Batch& batch) : memory(batch.expected()) {
    for (Bytes& each : memory) each.assign(each.size(), 0xCC);
    for (size_t i = 0; i < batch.sources.size(); ++i) {
      const Bytes& source = batch.sources[i];
      direct.push_back(
          {memory[i + 1].data(), source.data(), static_cast<int64_t>(source.size())});
    }
  }

  Job job(const Batch& batch, Stream stream = kCopies) {
    return {memory[0].data(),
            static_cast<int64_t>(memory[0].size()),
            batch.slots.data(),
            static_cast<int64_t>(batch.slots.size()),
            nullptr,
            direct.data(),
            static_cast<int64_t>(direct.size()),
            stream};
  }

  std::vector<Bytes> memory;
  std::vector<Copy> direct;
};

// An engine on a device without delays.
struct Bench {
  explicit Bench(Limits limits = {}, Engine::PackBytes pack_bytes = pack)
      : runtime(3, 0), engine(&runtime, pack_bytes, limits) {
    now = &runtime;
  }
  ~Bench() { synchronize(); }

  void synchronize() {
    for (int64_t id = 0; id < 3; ++id) runtime.synchronize({id, 0});
  }

  // Stops a stream until the gate is opened.
  GateRef stop(const Stream& stream) {
    auto gate = std::make_shared<Gate>();
    runtime.run(stream, [gate] { gate->wait(); });
    return gate;
  }

  SendResult send(const Batch& batch, Target* target, Stream copies = kCopies) {
    return engine.send(target->job(batch, copies));
  }

  Random random{7};
  fake::Runtime runtime;
  Engine engine;
};

using Calls = std::vector<std::string>;

inline int64_t count(const Calls& calls, const std::string& name) {
  int64_t num = 0;
  for (const std::string& call : calls) num += call == name ? 1 : 0;
  return num;
}

// Returns the message of an error, or an empty string.
inline std::string message(const std::exception_ptr& error) {
  if (error == nullptr) return "";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& caught) {
    return caught.what();
  }
}

}  // namespace fake
