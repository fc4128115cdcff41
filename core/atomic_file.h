#pragma once

// Internal: files that are written completely or not at all.

#include <cstdint>
#include <string>

#include "core/checksum.h"

namespace potluck {

/// A file that is written under a temporary name and moved to its final path by commit(). A reader of the path finds
/// either the old content or the new one. Destruction without commit() leaves no trace; neither does a killed process,
/// where the file system supports files without a name.
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

    /// Number of bytes written so far.
    std::int64_t bytes() const { return bytes_; }
    std::string checksum() const { return checksum_.text(); }

private:
    void give_name();
    [[noreturn]] void fail(const char* what) const;

    std::string op_;
    std::string path_;    // as the user gave it
    std::string target_;  // after following symbolic links
    std::string folder_;
    std::string temporary_;  // empty as long as the file has no name
    int file_ = -1;
    std::int64_t bytes_ = 0;
    std::int64_t started_ = 0;  // of these the disk has been told
    Checksum checksum_;
};

}  // namespace potluck
