#pragma once

// Internal: TensorBoard's event files.

#include <cstdint>
#include <fstream>
#include <span>
#include <string>
#include <string_view>

namespace potluck {

/// One number of a step under the name ("loss/train") of the curve that it belongs to; TensorBoard groups curves by what
/// stands before the slash.
struct EventScalar {
    std::string_view tag;
    double value = 0.0;  // stored as f32
};

/// The event files of one run, which TensorBoard shows when it is given the folder (or one above it).
///
/// A file is a sequence of records in the framing of TFRecord: u64 length, u32 masked CRC-32C of it, the content, u32 masked
/// CRC-32C of that, little-endian (tensorflow.org/tutorials/load_data/tfrecord). Each holds a protocol buffer Event
/// (tensorflow/core/util/event.proto, tensorflow/core/framework/summary.proto; protobuf.dev/programming-guides/encoding):
/// wall_time = 1, step = 2, and one of file_version = 3, summary = 5 with the scalars, session_log = 7.
///
/// Every process that goes on with a run writes a file of its own, events.out.tfevents.00000.potluck and so on. Its
/// beginning tells a TensorBoard that is watching which steps are void.
class EventFile {
public:
    /// Starts the next file in `folder`, which is made. Steps after `last_step` that are in earlier files (a run that was
    /// killed had gone beyond its last checkpoint) are cut off there, with whatever a dying process left half written.
    /// Nothing shows twice. Throws Error when the folder cannot be written.
    EventFile(const std::string& folder, std::int64_t last_step, double wall_time);

    /// Adds the numbers of one step; `wall_time` in seconds since 1970. Throws Error when the file cannot be written.
    void append(std::int64_t step, double wall_time, std::span<const EventScalar> scalars);

private:
    void write(const std::string& event);

    std::string path_;
    std::ofstream stream_;
};

/// The CRC-32C (Castagnoli) of bytes: RFC 3720, appendix B.4, has values to compare with.
std::uint32_t crc32c(std::string_view bytes);

}  // namespace potluck
