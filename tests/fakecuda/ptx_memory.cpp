// Loads, stores, moves and branches.
#include <cstdio>

#include "ptx_step.h"

namespace fakecuda::ptx {
namespace {

std::string hex(uint64_t value) {
  char text[20];
  std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

uint64_t parameters_of(const Thread& thread) {
  return reinterpret_cast<uint64_t>(thread.parameters);
}

// Returns the host memory of an access. Fails if the address is misaligned or outside
// of parameter memory, and asks the launch's Memory about global addresses.
uint8_t* locate(const Thread& thread, const Instruction& i, int nbytes, bool write) {
  const uint64_t address =
      thread.get<uint64_t>(i.operands[0]) + static_cast<uint64_t>(i.offset);
  const auto needed = static_cast<uint64_t>(nbytes);
  if (address % needed != 0) {
    fail(thread, i,
         "the address must be a multiple of " + std::to_string(nbytes) + ", but is " +
             hex(address));
  }
  const uint64_t size = thread.kernel.parameter_bytes;
  const bool is_offset = i.space == Space::kParameter;
  const uint64_t offset = is_offset ? address : address - parameters_of(thread);
  const bool inside = offset < size && needed <= size - offset;
  if (is_offset && !inside) {
    fail(thread, i,
         std::to_string(nbytes) + " bytes at " + hex(address) + " are outside of the " +
             std::to_string(size) + " bytes of parameter memory");
  }
  if (inside && i.space != Space::kGlobal) return thread.parameters + offset;
  thread.memory.access(address, nbytes, write, text_of(thread, i));
  return reinterpret_cast<uint8_t*>(address);
}

// Loads `count` items to operands[1] and the following.
template <typename T, int count>
const Instruction* load(Thread& thread, const Instruction& i) {
  T items[count];
  memcpy(items, locate(thread, i, sizeof(items), false), sizeof(items));
  for (int item = 0; item < count; ++item) {
    thread.set(i.operands[1 + item], items[item]);
  }
  return &i + 1;
}

template <typename T, int count>
const Instruction* store(Thread& thread, const Instruction& i) {
  T items[count];
  for (int item = 0; item < count; ++item) {
    items[item] = thread.get<T>(i.operands[1 + item]);
  }
  memcpy(locate(thread, i, sizeof(items), true), items, sizeof(items));
  return &i + 1;
}

// Floating-point numbers are moved as their bits.
template <bool loads, int count>
Step access_step(const Statement& s, const std::string& type) {
  return visit(kAllIntegers, s, type == "f32" ? "u32" : type, [](auto t) {
    using T = typename decltype(t)::type;
    return loads ? &load<T, count> : &store<T, count>;
  });
}

template <bool loads>
void decode_access(Statement& s, Instruction* i) {
  if (s.take("global")) {
    i->space = Space::kGlobal;
  } else if (loads && s.take("param")) {
    i->space = Space::kParameter;
  }
  if (!loads && i->space != Space::kGlobal) s.fail("st must be st.global");
  s.take(loads ? "nc" : "wb");  // the caches of the device
  const size_t count = s.take("v2") ? 2 : s.take("v4") ? 4 : 1;
  const std::string type = s.take_type();
  s.finish(2);
  s.use_address(i, s.operand(loads ? 1 : 0));
  const Operand& value = s.operand(loads ? 0 : 1);
  if (count > 1 && value.items.size() != count) {
    s.fail(".v" + std::to_string(count) + " must have " + std::to_string(count) +
           " items, but has " + std::to_string(value.items.size()));
  }
  for (size_t item = 0; item < count; ++item) {
    const Operand& each = count == 1 ? value : value.items[item];
    i->operands[1 + item] =
        loads ? s.write(each, type, true) : s.read(each, type, true);
  }
  i->run = count == 1   ? access_step<loads, 1>(s, type)
           : count == 2 ? access_step<loads, 2>(s, type)
                        : access_step<loads, 4>(s, type);
}

const Instruction* move(Thread& thread, const Instruction& i) {
  thread.slots[i.operands[0]] = thread.slots[i.operands[1]];
  return &i + 1;
}

const Instruction* parameter_address(Thread& thread, const Instruction& i) {
  const auto offset = thread.get<uint64_t>(i.operands[1]);
  thread.set(i.operands[0], parameters_of(thread) + offset);
  return &i + 1;
}

void decode_move(Statement& s, Instruction* i) {
  const std::string type = s.take_type();
  i->run = &move;
  s.use(i, {type, type});
}

const Instruction* branch(Thread&, const Instruction& i) { return &i + i.offset; }

const Instruction* end(Thread&, const Instruction&) { return nullptr; }

// The parser sets the distance once it knows the label.
void decode_branch(Statement& s, Instruction* i) {
  s.take("uni");
  s.finish(1);
  i->run = &branch;
}

}  // namespace

Opcodes memory_opcodes() {
  return {{"ld", decode_access<true>},
          {"st", decode_access<false>},
          {"mov", decode_move},
          {"cvta.to.global.u64", fixed(&move, {"u64", "u64"})},
          {"cvta.param.u64", fixed(&parameter_address, {"u64", "u64"})},
          {"bra", decode_branch},
          {"ret", fixed(&end, {})}};
}

}  // namespace fakecuda::ptx
