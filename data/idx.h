#pragma once

#include <string>

#include "core/tensor.h"

namespace potluck::data {

/// Reads an IDX file, the format of MNIST and its relatives, packed by gzip or not, whichever its first bytes say it is. The
/// shape is the file's; the dtype is u8, i32 (of files with 8, 16 or 32 bits with a sign), f32 or f64.
/// The format: Y. LeCun, C. Cortes, C. J. C. Burges, "The MNIST database of handwritten digits".
///
///     data::TensorDataset digits(data::read_idx("train-images-idx3-ubyte.gz").unsqueeze(3),  // (60000, 28, 28, 1)
///                                data::read_idx("train-labels-idx1-ubyte.gz").to(DType::i64));
///
/// Throws Error that names the file and the reason when it cannot be read, is no IDX file, or is longer or shorter than its
/// shape says (before memory is taken for it); with gzip also when its checksum does not fit.
Tensor read_idx(const std::string& path);

}  // namespace potluck::data
