#pragma once

// Internal: files that appear whole or not at all.

#include <cstdint>
#include <string>

#include "core/checksum.h"

namespace potluck {

/// A file that is written beside its final place and moved there by commit(). Whoever opens the path finds the old
/// content or the new one. Destroyed before commit(), it leaves no trace; killed, it leaves none either where the file
/// system can hold files without a name.
class AtomicFile {
public:
    /// Throws Error(op, ...) when the folder cannot be written.
    AtomicFile(std::string op, const std::string& path);
    ~AtomicFile();
    AtomicFile(const AtomicFile&) = delete;
    AtomicFile& operator=(const AtomicFile&) = delete;

    void write(const void* data, std::int64_t bytes);
    /// Makes the content durable (fsync), then visible (rename), then the name durable (fsync of the folder).
    void commit();

    /// Of what was written.
    std::int64_t bytes() const { return bytes_; }
    std::string checksum() const { return checksum_.text(); }

private:
    void give_name();
    [[noreturn]] void fail(const char* what) const;

    std::string op_;
    std::string path_;    // as the user named it
    std::string target_;  // behind symbolic links
    std::string folder_;
    std::string temporary_;  // empty as long as the file has no name
    int file_ = -1;
    std::int64_t bytes_ = 0;
    std::int64_t started_ = 0;  // of these the disk has been told
    Checksum checksum_;
};

}  // namespace potluck
