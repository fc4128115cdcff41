#pragma once

// Internal: small pictures for the report.

#include <string>

#include "core/tensor.h"

namespace potluck {

/// A PNG file (w3.org/TR/png-3) of u8 (height, width, channels) with 1 (grey), 3 (RGB) or 4 (RGB and alpha) channels. It is
/// not compressed: deflate's stored blocks (RFC 1951, 3.2.4). Throws Error for any other tensor.
std::string png_of(const Tensor& image);

/// Base64 (RFC 4648), as data URIs hold it.
std::string base64(const std::string& bytes);

}  // namespace potluck
