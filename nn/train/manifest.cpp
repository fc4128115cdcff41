#include "nn/train/manifest.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <utility>

#include "core/format.h"
#include "core/safetensors.h"

namespace potluck {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int newest_version = 2;
constexpr const char* op = "load_checkpoint";

constexpr std::array<std::pair<DType, const char*>, 8> dtype_names = {{
    {DType::f64, "float64"},
    {DType::f32, "float32"},
    {DType::f16, "float16"},
    {DType::bf16, "bfloat16"},
    {DType::i64, "int64"},
    {DType::i32, "int32"},
    {DType::u8, "uint8"},
    {DType::boolean, "bool"},
}};

const char* long_name_of(DType dtype) {
    return std::find_if(dtype_names.begin(), dtype_names.end(),
                        [&](const auto& entry) { return entry.first == dtype; })
        ->second;
}

/// Also accepts the short names, f32 for float32.
DType dtype_of_name(const std::string& name) {
    for (const auto& [dtype, long_name] : dtype_names)
        if (name == long_name || name == name_of(dtype)) return dtype;
    throw Error(op, fmt::format("\"{}\" is no dtype.", name));
}

std::string read_text(const fs::path& path) {
    std::ifstream stream(path, std::ios::binary);
    std::ostringstream content;
    content << stream.rdbuf();
    if (!stream) throw Error(op, fmt::format("{} cannot be read. Use an older checkpoint.", path.string()));
    return content.str();
}

/// The message of an Error or a JSON exception, without the leading [name], as a sentence.
std::string sentence_of(const std::exception& error) {
    std::string text = error.what();
    if (text.starts_with('[')) text.erase(0, text.find("] ") + 2);
    return text.ends_with('.') ? text : text + ".";
}

Error damaged(const std::string& path, const std::string& why) {
    return {op, fmt::format("{} is damaged: {} Use an older checkpoint.", path, why)};
}

/// Calls `read(text as JSON)` and converts everything that does not fit to an Error that names the file.
template <class Read>
auto reading(const std::string& text, const std::string& path, Read&& read) {
    try {
        const json content = json::parse(text);
        if (!content.is_object()) throw Error(op, "it is no object.");
        return read(content);
    } catch (const json::exception& error) {
        throw damaged(path, sentence_of(error));
    } catch (const Error& error) {
        throw damaged(path, sentence_of(error));
    }
}

/// A non-negative integer.
template <class Integer = std::int64_t>
Integer count_at(const json& object, const char* name) {
    const json& value = object.at(name);
    if (!value.is_number_unsigned())
        throw Error(op, fmt::format("\"{}\" is {}, and must be an integer from 0 on.", name, value.dump()));
    const auto number = value.get<std::uint64_t>();
    if (!std::in_range<Integer>(number)) throw Error(op, fmt::format("\"{}\" is {}.", name, number));
    return static_cast<Integer>(number);
}

const json& at(const json& object, const char* name, json::value_t type) {
    const json& value = object.at(name);
    if (value.type() != type)
        throw Error(op, fmt::format("\"{}\" is {}, and must be {}.", name, value.type_name(),
                                    json(type).type_name()));
    return value;
}

TrainingState state_of(const json& content) {
    const json& loader = at(content, "loader", json::value_t::object);
    TrainingState state;
    state.step = count_at(content, "step");
    state.epochs = count_at(content, "epochs");
    state.loader.seed = count_at<std::uint64_t>(loader, "seed");
    state.loader.epoch = count_at(loader, "epoch");
    state.loader.item = count_at(loader, "item");
    state.loader.size = count_at(loader, "size");
    if (state.loader.item > state.loader.size)
        throw Error(op,
                    fmt::format("the loader stands at item {} of {}.", state.loader.item, state.loader.size));
    for (const auto& [device, key] : at(content, "generators", json::value_t::object).items()) {
        parse_device(device);  // throws for an invalid device
        state.generators[device] = {count_at<std::uint64_t>(key, "seed"),
                                    count_at<std::uint64_t>(key, "offset")};
    }
    if (content.contains("loss_scaler")) {
        const json& scaler = at(content, "loss_scaler", json::value_t::object);
        state.loss_scaler = {scaler.at("scale").get<double>(), count_at(scaler, "good_updates"),
                             count_at(scaler, "skipped_in_a_row")};
        if (!(state.loss_scaler->scale > 0.0) || std::isinf(state.loss_scaler->scale))
            throw Error(op, fmt::format("the loss scale is {}.", state.loss_scaler->scale));
    }
    return state;
}

/// Names come from a file: none may point outside of the checkpoint's folder.
std::string file_name_at(const json& object, const char* field) {
    auto name = object.at(field).get<std::string>();
    if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos ||
        name.find('\0') != std::string::npos)
        throw Error(op, fmt::format("\"{}\" is no name of a file in this folder.", name));
    return name;
}

/// 16 hexadecimal digits: without them a file would not be verified.
std::string checksum_at(const json& file) {
    const json& value = file.at("xxh3");
    const std::string text = value.is_string() ? value.get<std::string>() : "";
    if (text.size() != 16 || text.find_first_not_of("0123456789abcdef") != std::string::npos)
        throw Error(op, fmt::format("\"xxh3\" is {}, and must be 16 hexadecimal digits.", value.dump()));
    return text;
}

Shape shape_at(const json& described) {
    Shape shape;
    for (const json& size : at(described, "shape", json::value_t::array)) {
        if (!size.is_number_integer())
            throw Error(op, fmt::format("\"shape\" holds {}, which is no integer.", size.dump()));
        shape.push_back(size.get<std::int64_t>());
    }
    return shape;
}

std::int64_t elements_of(const Shape& shape) {
    std::int64_t count = 1, strides = 1;
    for (const std::int64_t size : shape) {
        if (size < 0 || __builtin_mul_overflow(strides, std::max<std::int64_t>(size, 1), &strides))
            throw Error(op, fmt::format("{} is no shape.", pretty(shape)));
        count *= size;
    }
    return count;
}

/// Describes the tensors of a file of a version 1 checkpoint: whole tensors, with `prefix` before their names.
void describe_whole(Manifest& manifest, const fs::path& checkpoint, const std::string& file,
                    const std::string& prefix) {
    const TensorFile content = load_safetensors(checkpoint / file);
    for (const auto& [name, tensor] : content.tensors)
        manifest.tensors[prefix + name] = {tensor.shape(), tensor.dtype(), {{file, 0, tensor.count(), name}}};
    constexpr std::string_view tied = "tied.";
    for (const auto& [key, first_name] : content.metadata)
        if (key.starts_with(tied)) manifest.tied[key.substr(tied.size())] = first_name;
}

Manifest manifest_of_version_1(const fs::path& checkpoint) {
    Manifest manifest;
    std::istringstream marker(read_text(checkpoint / "DONE"));
    for (Manifest::File file; marker >> file.name >> file.bytes;) manifest.files.push_back(file);
    std::set<std::string> names;
    for (const Manifest::File& file : manifest.files) names.insert(file.name);
    if (manifest.files.size() != 3 ||
        names != std::set<std::string>{"model.safetensors", "optimizer.safetensors", "training.json"})
        throw damaged(checkpoint / "DONE",
                      fmt::format("it lists \"{}\", and must list model.safetensors, optimizer.safetensors "
                                  "and training.json with their bytes.",
                                  fmt::join(names, ", ")));
    const fs::path training = checkpoint / "training.json";
    manifest.state = reading(read_text(training), training, state_of);
    return manifest;
}

void check_sizes(const Manifest& manifest, const fs::path& checkpoint) {
    for (const Manifest::File& file : manifest.files) {
        const fs::path path = checkpoint / file.name;
        std::error_code failure;
        const bool is_file = fs::is_regular_file(path, failure);
        if (!is_file) throw Error(op, fmt::format("{} is missing. Use an older checkpoint.", path.string()));
        const auto bytes = fs::file_size(path, failure);
        if (failure || !std::in_range<std::int64_t>(bytes) || static_cast<std::int64_t>(bytes) != file.bytes)
            throw Error(op, fmt::format("{} has {} bytes, where {} were written. It was cut or comes from "
                                        "another checkpoint: use an older one.",
                                        path.string(), bytes, file.bytes));
    }
}

}  // namespace

void Manifest::add(const Manifest& other) {
    for (const File& file : other.files) {
        if (std::any_of(files.begin(), files.end(), [&](const File& own) { return own.name == file.name; }))
            throw Error("save_checkpoint",
                        fmt::format("two ranks wrote {}. Give each its own number.", file.name));
        files.push_back(file);
    }
    for (const auto& [name, theirs] : other.tensors) {
        const auto [own, is_new] = tensors.try_emplace(name, theirs);
        if (is_new) continue;
        if (own->second.shape != theirs.shape || own->second.dtype != theirs.dtype)
            throw Error("save_checkpoint",
                        fmt::format("{} is {} of {} for one rank and {} of {} for another.", name,
                                    pretty(own->second.shape), own->second.dtype, pretty(theirs.shape),
                                    theirs.dtype));
        own->second.parts.insert(own->second.parts.end(), theirs.parts.begin(), theirs.parts.end());
    }
    tied.insert(other.tied.begin(), other.tied.end());
}

void Manifest::check(const std::string& checked_op) const {
    for (const auto& [name, tensor] : tensors) {
        std::vector<std::pair<std::int64_t, std::int64_t>> ranges;
        for (const Part& part : tensor.parts) ranges.emplace_back(part.begin, part.end);
        std::sort(ranges.begin(), ranges.end());
        std::int64_t covered = 0;
        bool fits = true;
        for (const auto& [begin, end] : ranges) {
            fits = fits && begin == covered && end >= begin;
            covered = end;
        }
        const std::int64_t count = elements_of(tensor.shape);
        if (!fits || covered != count)
            throw Error(checked_op, fmt::format("the parts of {} do not cover its {} elements once: {}.",
                                                name, count, fmt::join(ranges, ", ")));
    }
}

std::string to_json(const Manifest& manifest) {
    json files = json::array(), tensors = json::object(), generators = json::object();
    for (const Manifest::File& file : manifest.files)
        files.push_back({{"name", file.name}, {"bytes", file.bytes}, {"xxh3", file.xxh3}});
    for (const auto& [name, tensor] : manifest.tensors) {
        json parts = json::array();
        for (const Manifest::Part& part : tensor.parts)
            parts.push_back({{"file", part.file}, {"begin", part.begin}, {"end", part.end}});
        tensors[name] = {{"shape", tensor.shape}, {"dtype", long_name_of(tensor.dtype)}, {"parts", parts}};
    }
    for (const auto& [device, key] : manifest.state.generators)
        generators[device] = {{"seed", key.seed}, {"offset", key.offset}};
    const TrainingState& state = manifest.state;
    json content = {{"version", newest_version},
                    {"step", state.step},
                    {"epochs", state.epochs},
                    {"files", files},
                    {"tensors", tensors},
                    {"tied", manifest.tied},
                    {"generators", generators},
                    {"loader",
                     {{"seed", state.loader.seed},
                      {"epoch", state.loader.epoch},
                      {"item", state.loader.item},
                      {"size", state.loader.size}}}};
    if (state.loss_scaler)
        content["loss_scaler"] = {{"scale", state.loss_scaler->scale},
                                  {"good_updates", state.loss_scaler->good_updates},
                                  {"skipped_in_a_row", state.loss_scaler->skipped_in_a_row}};
    const auto cpu = state.generators.find(name_of(Device::cpu()));
    if (cpu != state.generators.end()) content["seed"] = cpu->second.seed;
    try {
        return content.dump(1) + "\n";
    } catch (const json::exception&) {
        throw Error("save_checkpoint", "the name of a tensor is not valid UTF-8.");
    }
}

Manifest manifest_of(const std::string& text, const std::string& path) {
    const auto version =
        reading(text, path, [](const json& content) { return count_at(content, "version"); });
    if (version != newest_version)
        throw Error(op, fmt::format("{} has version {}, and this program reads version {}. Use the one that "
                                    "wrote it, or a newer one.",
                                    path, version, newest_version));
    return reading(text, path, [](const json& content) {
        Manifest manifest;
        manifest.state = state_of(content);
        for (const json& file : at(content, "files", json::value_t::array))
            manifest.files.push_back(
                {file_name_at(file, "name"), count_at(file, "bytes"), checksum_at(file)});
        for (const auto& [name, described] : at(content, "tensors", json::value_t::object).items()) {
            Manifest::Described& tensor = manifest.tensors[name];
            tensor.shape = shape_at(described);
            tensor.dtype = dtype_of_name(described.at("dtype").get<std::string>());
            for (const json& part : at(described, "parts", json::value_t::array)) {
                tensor.parts.push_back(
                    {file_name_at(part, "file"), count_at(part, "begin"), count_at(part, "end"), name});
                const bool listed = std::any_of(
                    manifest.files.begin(), manifest.files.end(),
                    [&](const Manifest::File& file) { return file.name == tensor.parts.back().file; });
                if (!listed)
                    throw Error(op, fmt::format("{} lies in {}, which is none of the files.", name,
                                                tensor.parts.back().file));
            }
        }
        if (content.contains("tied")) content.at("tied").get_to(manifest.tied);
        manifest.check(op);
        return manifest;
    });
}

std::int64_t step_of(const fs::path& checkpoint) {
    constexpr std::string_view prefix = "step_";
    const std::string name = checkpoint.filename().string();
    const std::string digits = name.starts_with(prefix) ? name.substr(prefix.size()) : "";
    const bool all_digits =
        !digits.empty() && digits.size() < 19 && digits.find_first_not_of("0123456789") == std::string::npos;
    return all_digits ? std::stoll(digits) : -1;
}

Manifest read_manifest(const std::string& checkpoint) {
    const fs::path folder = checkpoint;
    std::error_code failure;
    if (!fs::is_directory(folder, failure))
        throw Error(op, fmt::format("there is no checkpoint {}. Give the folder of one step, "
                                    "step_00000010 for instance.",
                                    checkpoint));
    const bool is_version_1 =
        !fs::exists(folder / manifest_file, failure) && fs::exists(folder / "DONE", failure);
    if (!is_version_1 && !fs::is_regular_file(folder / manifest_file, failure))
        throw Error(op,
                    fmt::format("{} is not complete: it has no {}, which is written last. Use an older one.",
                                checkpoint, manifest_file));
    Manifest manifest = is_version_1 ? manifest_of_version_1(folder)
                                     : manifest_of(read_text(folder / manifest_file), folder / manifest_file);
    const std::int64_t named = step_of(folder.has_filename() ? folder : folder.parent_path());
    if (named >= 0 && named != manifest.state.step)
        throw damaged(
            folder / (is_version_1 ? "training.json" : manifest_file),
            fmt::format("\"step\" is {}, and the folder is that of step {}.", manifest.state.step, named));
    check_sizes(manifest, folder);
    if (is_version_1) {
        describe_whole(manifest, folder, "model.safetensors", "");
        describe_whole(manifest, folder, "optimizer.safetensors", Manifest::optimizer_prefix);
    }
    return manifest;
}

}  // namespace potluck
