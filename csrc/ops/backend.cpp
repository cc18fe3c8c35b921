#include "ops/backend.h"

#include <array>

namespace pyparallel::ops {
namespace {

struct Entry {
  Backend backend{};
  bool present = false;
};

using Registry = std::array<Entry, c10::COMPILE_TIME_MAX_DEVICE_TYPES>;

Registry& registry() {
  static Registry entries;
  return entries;
}

}  // namespace

bool register_backend(c10::DeviceType type, Backend backend) {
  registry().at(static_cast<size_t>(type)) = {backend, true};
  return true;
}

const Backend* find_backend(c10::DeviceType type) {
  const Entry& entry = registry().at(static_cast<size_t>(type));
  return entry.present ? &entry.backend : nullptr;
}

std::vector<c10::DeviceType> registered_devices() {
  std::vector<c10::DeviceType> types;
  for (size_t type = 0; type < registry().size(); ++type) {
    if (registry()[type].present) {
      types.push_back(static_cast<c10::DeviceType>(type));
    }
  }
  return types;
}

}  // namespace pyparallel::ops
