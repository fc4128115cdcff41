#include "core/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>

#include "core/atomic_file.h"
#include "core/copies.h"
#include "core/format.h"
#include "core/op_scope.h"
#include "core/safetensors_header.h"

namespace potluck {
namespace {

constexpr std::int64_t longest_header = 100'000'000;  // the limit of the format
constexpr std::int64_t alignment = 64;                // of the data in the file

/// A whole file mapped into memory; pages are read when they are first used. Changes stay in this process.
class Mapping {
public:
    explicit Mapping(const std::string& path) {
        const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        if (file < 0) fail(path, std::strerror(errno));
        struct stat about {};
        const bool is_file = fstat(file, &about) == 0 && S_ISREG(about.st_mode);
        size_ = about.st_size;
        if (is_file && size_ > 0) {
            void* data =
                mmap(nullptr, static_cast<std::size_t>(size_), PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
            data_ = data == MAP_FAILED ? nullptr : static_cast<std::byte*>(data);
        }
        const int reason = errno;
        close(file);
        if (!is_file) fail(path, "it is no ordinary file");
        if (data_ == nullptr && size_ > 0) fail(path, std::strerror(reason));
    }
    ~Mapping() {
        if (data_ != nullptr) munmap(data_, static_cast<std::size_t>(size_));
    }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    std::byte* data() const { return data_; }
    std::int64_t size() const { return size_; }

private:
    [[noreturn]] static void fail(const std::string& path, const char* why) {
        throw Error("load_safetensors", fmt::format("{} cannot be read: {}.", path, why));
    }

    std::byte* data_ = nullptr;
    std::int64_t size_ = 0;
};

/// Length of the header, from the first 8 bytes (little-endian).
std::int64_t header_length(const std::string& path, const Mapping& file) {
    const auto refuse = [&](const std::string& what) {
        throw Error("load_safetensors", fmt::format("{}: {}", path, what));
    };
    if (file.size() < 8)
        refuse(fmt::format(
            "the file has {} bytes; a safetensors file begins with the 8 bytes of its header's length.",
            file.size()));
    std::uint64_t length = 0;
    for (std::size_t i = 8; i-- > 0;) length = length << 8 | std::to_integer<std::uint64_t>(file.data()[i]);
    if (length > static_cast<std::uint64_t>(longest_header))
        refuse(
            fmt::format("the header would have {} bytes; the format allows {}. This is no safetensors file.",
                        length, longest_header));
    if (length > static_cast<std::uint64_t>(file.size() - 8))
        refuse(
            fmt::format("the header has {} bytes, and the file only {} after the first 8: it is cut short.",
                        length, file.size() - 8));
    return static_cast<std::int64_t>(length);
}

void check_booleans(const std::string& path, const HeaderEntry& entry, const std::byte* data) {
    const auto* wrong = std::find_if(data, data + (entry.end - entry.begin),
                                     [](std::byte value) { return value > std::byte{1}; });
    if (wrong != data + (entry.end - entry.begin))
        throw Error(
            "load_safetensors",
            fmt::format("{}: tensor \"{}\" of dtype BOOL has the byte {} at {}; only 0 and 1 are allowed.",
                        path, entry.name, std::to_integer<int>(*wrong), wrong - data));
}

Tensor tensor_in(const std::shared_ptr<Mapping>& file, std::byte* data, const HeaderEntry& entry) {
    if (entry.begin == entry.end) return Tensor::empty(entry.shape, {entry.dtype});
    const std::int64_t bytes = entry.end - entry.begin;
    if (reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(size_of(entry.dtype)) != 0) {
        // Other writers may place a tensor at any address; the CPU requires aligned elements.
        Tensor copy = Tensor::empty(entry.shape, {entry.dtype});
        std::memcpy(copy.raw_data(), data, static_cast<std::size_t>(bytes));
        return copy;
    }
    auto storage = std::make_shared<Storage>(Device::cpu(), data, bytes, [file] {});
    return Tensor::view_of(std::move(storage), entry.dtype, entry.shape, contiguous_strides(entry.shape), 0);
}

// ---- writing ----

/// Sorted by element size (largest first), then by name: so every tensor is aligned for its dtype without padding.
std::vector<const std::pair<const std::string, Tensor>*> order_of_data(const TensorFile& file) {
    std::vector<const std::pair<const std::string, Tensor>*> order;
    for (const auto& named : file.tensors) order.push_back(&named);
    std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
        return size_of(a->second.dtype()) > size_of(b->second.dtype());
    });
    return order;
}

std::string json_text(const std::string& text) {
    try {
        return nlohmann::json(text).dump();
    } catch (const nlohmann::json::exception&) {
        throw Error("save_safetensors", "a name or a metadata text is not valid UTF-8.");
    }
}

/// The header, preceded by its length and padded with blanks so that the data begins aligned.
std::string header_of(const TensorFile& file,
                      const std::vector<const std::pair<const std::string, Tensor>*>& order) {
    std::string text = "{";
    if (!file.metadata.empty()) {
        text += "\"__metadata__\":{";
        for (const auto& [key, value] : file.metadata)
            text += fmt::format("{}{}:{}", text.back() == '{' ? "" : ",", json_text(key), json_text(value));
        text += "}";
    }
    std::int64_t begin = 0;
    for (const auto* named : order) {
        const Tensor& tensor = named->second;
        text += fmt::format(R"({}{}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                            text == "{" ? "" : ",", json_text(named->first), safetensors_name(tensor.dtype()),
                            fmt::join(tensor.shape(), ","), begin, begin + tensor.bytes());
        begin += tensor.bytes();
    }
    text += "}";
    while ((8 + text.size()) % alignment != 0) text += ' ';
    if (static_cast<std::int64_t>(text.size()) > longest_header)
        throw Error("save_safetensors",
                    fmt::format("the header would have {} bytes; the format allows {}. Use fewer "
                                "tensors or shorter names.",
                                text.size(), longest_header));
    std::string length(8, '\0');
    for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(text.size() >> (8 * i) & 0xff);
    return length + text;
}

void write_tensor(AtomicFile& file, const Tensor& tensor) {
    const Tensor dense = detail::as_contiguous(tensor);
    if (dense.device().is_cpu()) return file.write(dense.raw_data(), dense.bytes());
    constexpr std::int64_t at_once = std::int64_t{16} << 20;
    std::vector<std::byte> part(static_cast<std::size_t>(std::min(at_once, dense.bytes())));
    for (std::int64_t done = 0; done < dense.bytes(); done += at_once) {
        const std::int64_t n = std::min(at_once, dense.bytes() - done);
        detail::read_bytes(dense, done, n, part.data());
        file.write(part.data(), n);
    }
}

}  // namespace

TensorFile load_safetensors(const std::string& path) {
    const OpScope scope("load_safetensors");
    const auto file = std::make_shared<Mapping>(path);
    const std::int64_t length = header_length(path, *file);
    std::byte* data = file->data() + 8 + length;
    Header header = parse_safetensors_header(
        path, {reinterpret_cast<const char*>(file->data()) + 8, static_cast<std::size_t>(length)},
        file->size() - 8 - length);
    TensorFile result;
    result.metadata = std::move(header.metadata);
    for (HeaderEntry& entry : header.entries) {
        std::byte* at = data + entry.begin;
        if (entry.dtype == DType::boolean) check_booleans(path, entry, at);
        Tensor tensor = tensor_in(file, at, entry);
        result.tensors.emplace(std::move(entry.name), std::move(tensor));
    }
    return result;
}

WrittenFile save_safetensors(const std::string& path, const TensorFile& file) {
    const OpScope scope("save_safetensors");
    for (const auto& [name, tensor] : file.tensors) {
        if (!tensor.defined())
            throw Error("save_safetensors", fmt::format("tensor \"{}\" is undefined.", name));
        if (name == "__metadata__")
            throw Error("save_safetensors",
                        "a tensor cannot be called __metadata__: the format keeps that name.");
    }
    const auto order = order_of_data(file);
    const std::string header = header_of(file, order);
    AtomicFile target("save_safetensors", path);
    target.write(header.data(), static_cast<std::int64_t>(header.size()));
    for (const auto* named : order) write_tensor(target, named->second);
    target.commit();
    return {target.bytes(), target.checksum()};
}

}  // namespace potluck
