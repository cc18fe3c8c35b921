#pragma once

#include <string>
#include <utility>
#include <vector>

namespace pyparallel::ops {

// What this module was built with: pairs of a name and its value.
std::vector<std::pair<std::string, std::string>> build_info();

}  // namespace pyparallel::ops
