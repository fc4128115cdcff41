#include "data/idx.h"

#include <zlib.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <vector>

#include "core/format.h"

namespace potluck::data {

namespace {

/// A file that zlib unpacks while it is read, or that is read as it is.
class UnpackedFile {
public:
    explicit UnpackedFile(const std::string& path) : path_(path) {
        std::error_code failure;
        const bool is_file = std::filesystem::is_regular_file(path, failure);
        errno = 0;
        if (is_file) file_.reset(gzopen(path.c_str(), "rb"));
        if (file_ == nullptr)
            throw Error("read_idx", fmt::format("cannot read {}: {}. Give an existing file.", path,
                                                errno != 0 ? std::strerror(errno) : "there is no such file"));
        packed_bytes_ = static_cast<std::int64_t>(std::filesystem::file_size(path));
    }

    [[noreturn]] void fail(const std::string& reason) const {
        throw Error("read_idx", fmt::format("{}: {} Replace the file.", path_, reason));
    }

    /// `what` is what is read, for the message when the file ends before its end.
    void read(void* to, std::int64_t bytes, const char* what) {
        constexpr std::int64_t at_once = 1 << 30;
        auto* place = static_cast<std::byte*>(to);
        for (std::int64_t done = 0; done < bytes;) {
            const auto wanted = static_cast<unsigned>(std::min(bytes - done, at_once));
            const int got = gzread(file_.get(), place + done, wanted);
            if (got < 0) fail(fmt::format("it is damaged: {}.", failure()));
            if (got == 0) fail(fmt::format("it ends within {}.", what));
            done += got;
        }
    }

    /// Refuses a file that does not end here, or whose checksum does not fit.
    void expect_end() {
        char more = 0;
        const int got = gzread(file_.get(), &more, 1);
        if (got > 0) fail("it is longer than its shape says.");
        const int status = got < 0 ? Z_DATA_ERROR : gzclose_r(file_.release());
        if (status != Z_OK) fail("it is damaged: it is cut off, or its checksum does not fit.");
    }

    /// The most bytes that can come out of the file.
    std::int64_t most_bytes() const {
        constexpr std::int64_t most_compression = 1032;  // of DEFLATE
        return gzdirect(file_.get()) == 1 ? packed_bytes_ : packed_bytes_ * most_compression;
    }

private:
    struct Close {
        void operator()(gzFile file) const { gzclose_r(file); }
    };

    std::string failure() const {
        int code = 0;
        return gzerror(file_.get(), &code);
    }

    std::string path_;
    std::unique_ptr<gzFile_s, Close> file_;
    std::int64_t packed_bytes_ = 0;
};

enum class ElementKind : std::uint8_t {
    u8 = 0x08,
    i8 = 0x09,
    i16 = 0x0B,
    i32 = 0x0C,
    f32 = 0x0D,
    f64 = 0x0E
};

/// Reads the elements, of which each has the first byte first, into a tensor of T.
template <class Stored, class T>
Tensor read_elements(UnpackedFile& file, const Shape& shape) {
    Tensor result = Tensor::empty(shape, {dtype_of<T>()});
    T* to = result.data<T>();
    constexpr std::int64_t at_once = 1 << 16;
    std::array<std::uint8_t, sizeof(Stored)> bytes{};
    std::vector<std::uint8_t> piece(static_cast<std::size_t>(at_once) * sizeof(Stored));
    for (std::int64_t done = 0; done < result.count(); done += at_once) {
        const std::int64_t count = std::min(at_once, result.count() - done);
        file.read(piece.data(), count * static_cast<std::int64_t>(sizeof(Stored)), "its elements");
        for (std::int64_t i = 0; i < count; ++i) {
            const std::uint8_t* from = piece.data() + static_cast<std::size_t>(i) * sizeof(Stored);
            std::reverse_copy(from, from + sizeof(Stored), bytes.begin());
            Stored value;
            std::memcpy(&value, bytes.data(), sizeof value);
            to[done + i] = T{value};
        }
    }
    return result;
}

Tensor read_elements(UnpackedFile& file, ElementKind kind, const Shape& shape) {
    switch (kind) {
        case ElementKind::i8:
            return read_elements<std::int8_t, std::int32_t>(file, shape);
        case ElementKind::i16:
            return read_elements<std::int16_t, std::int32_t>(file, shape);
        case ElementKind::i32:
            return read_elements<std::int32_t, std::int32_t>(file, shape);
        case ElementKind::f32:
            return read_elements<float, float>(file, shape);
        case ElementKind::f64:
            return read_elements<double, double>(file, shape);
        default:
            return read_elements<std::uint8_t, std::uint8_t>(file, shape);
    }
}

std::int64_t bytes_of(ElementKind kind) {
    switch (kind) {
        case ElementKind::i16:
            return 2;
        case ElementKind::i32:
        case ElementKind::f32:
            return 4;
        case ElementKind::f64:
            return 8;
        default:
            return 1;
    }
}

}  // namespace

Tensor read_idx(const std::string& path) {
    UnpackedFile file(path);
    std::array<std::uint8_t, 4> magic{};
    file.read(magic.data(), 4, "its first four bytes");
    constexpr std::string_view kinds("\x08\x09\x0B\x0C\x0D\x0E", 6);
    if (magic[0] != 0 || magic[1] != 0 || kinds.find(static_cast<char>(magic[2])) == std::string_view::npos)
        file.fail(fmt::format("it is no IDX file: its first bytes are {:02x} {:02x} {:02x} {:02x}.", magic[0],
                              magic[1], magic[2], magic[3]));
    const auto kind = static_cast<ElementKind>(magic[2]);

    Shape shape;
    std::int64_t most_elements = file.most_bytes() / bytes_of(kind);
    bool fits = true;
    for (int axis = 0; axis < magic[3]; ++axis) {
        std::array<std::uint8_t, 4> size{};
        file.read(size.data(), 4, "its shape");
        shape.push_back(std::int64_t{size[0]} << 24 | size[1] << 16 | size[2] << 8 | size[3]);
        fits = fits && shape.back() <= most_elements;
        if (shape.back() > 0) most_elements /= shape.back();
    }
    const bool is_empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
    if (!fits && !is_empty)
        file.fail(fmt::format("its shape is {}, for which it is too short.", pretty(shape)));
    // An empty tensor has strides, too.
    double extent = 1.0;
    for (const std::int64_t size : shape) extent *= static_cast<double>(std::max<std::int64_t>(size, 1));
    if (extent > 0x1p60) file.fail(fmt::format("no tensor has the shape {}.", pretty(shape)));
    Tensor result = read_elements(file, kind, shape);
    file.expect_end();
    return result;
}

}  // namespace potluck::data
