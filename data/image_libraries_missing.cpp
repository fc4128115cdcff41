// In the place of png.cpp, jpeg.cpp and idx.cpp where the libraries that they need are not there (the option `headers`).

#include "core/error.h"
#include "data/idx.h"
#include "data/image.h"
#include "data/image_formats.h"

namespace potluck::data {

namespace {

[[noreturn]] void refuse(const char* op) {
    throw Error(
        op, "this build is without libpng, libjpeg and zlib. Build it on a machine that has their packages.");
}

}  // namespace

bool is_png(std::string_view) { refuse("image"); }
bool is_jpeg(std::string_view) { refuse("image"); }
DecodedImage decode_png(std::string_view, std::int64_t) { refuse("image"); }
DecodedImage decode_jpeg(std::string_view, std::int64_t) { refuse("image"); }
std::string encode_png(const Tensor&) { refuse("encode_png"); }
Tensor read_idx(const std::string&) { refuse("read_idx"); }

}  // namespace potluck::data
