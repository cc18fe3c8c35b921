#pragma once

#include <string>
#include <utility>
#include <vector>

namespace pyparallel::ops {

// Returns the versions and settings of the build as pairs of name and value.
std::vector<std::pair<std::string, std::string>> build_info();

}  // namespace pyparallel::ops
