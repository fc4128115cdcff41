#include "core/version.h"

namespace potluck {

std::string_view version() { return POTLUCK_VERSION; }

}  // namespace potluck
