#include "core/version.h"

#include <doctest/doctest.h>

TEST_CASE("version: the linked library says the version of the build") {
    CHECK(potluck::version() == POTLUCK_VERSION);
}
