#include "data/image_folder.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <filesystem>
#include <map>
#include <mutex>

#include "core/factories.h"
#include "core/format.h"

namespace potluck::data {

namespace {

namespace fs = std::filesystem;

/// What is in a folder, in the order of the names, without names that begin with a dot.
std::vector<fs::directory_entry> entries_of(const fs::path& folder) {
    std::error_code failure;
    std::vector<fs::directory_entry> entries;
    for (fs::directory_iterator entry(folder, failure), end; !failure && entry != end;
         entry.increment(failure))
        if (!entry->path().filename().native().starts_with('.')) entries.push_back(*entry);
    if (failure)
        throw Error("ImageFolder",
                    fmt::format("cannot read the folder {}: {}.", folder.string(), failure.message()));
    std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
        return a.path().filename().native() < b.path().filename().native();
    });
    return entries;
}

bool has_name_of_image(const fs::path& path) {
    std::string suffix = path.extension().string();
    std::transform(suffix.begin(), suffix.end(), suffix.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    return suffix == ".png" || suffix == ".jpg" || suffix == ".jpeg";
}

/// Appends the images of a folder and its subfolders. Returns how many other files there are.
std::int64_t find_images(const fs::path& folder, std::vector<std::string>& paths) {
    std::int64_t others = 0;
    for (const fs::directory_entry& entry : entries_of(folder)) {
        std::error_code failure;
        if (entry.is_directory(failure)) {
            // A link to a folder may lead round in a circle.
            if (!entry.is_symlink(failure)) others += find_images(entry.path(), paths);
        } else if (entry.is_regular_file(failure) && has_name_of_image(entry.path())) {
            paths.push_back(entry.path().string());
        } else {
            ++others;
        }
    }
    return others;
}

}  // namespace

struct ImageFolder::Files {
    std::vector<std::string> classes, paths;
    std::vector<std::int64_t> labels;  // of the paths
};

struct ImageFolder::Damage {
    std::mutex mutex;
    std::map<std::int64_t, std::string> reasons;  // by the number of the image
};

ImageFolder::ImageFolder(const std::string& folder, ImageFolderOptions options)
    : options_(options), damage_(std::make_shared<Damage>()) {
    if (options.channels != 1 && options.channels != 3 && options.channels != 4)
        throw Error("ImageFolder", fmt::format("channels is {}. It must be 1, 3 or 4.", options.channels));
    if (options.most_pixels < 1)
        throw Error("ImageFolder",
                    fmt::format("most_pixels is {}. It must be at least 1.", options.most_pixels));
    auto files = std::make_shared<Files>();
    for (const fs::directory_entry& entry : entries_of(folder)) {
        std::error_code failure;
        if (!entry.is_directory(failure)) continue;
        const std::size_t before = files->paths.size();
        const std::int64_t others = find_images(entry.path(), files->paths);
        if (files->paths.size() == before)
            throw Error(
                "ImageFolder",
                fmt::format("{} has no file in it that is named .png, .jpg or .jpeg ({} other files). "
                            "Put images there, or remove it.",
                            entry.path().string(), others));
        files->labels.resize(files->paths.size(), static_cast<std::int64_t>(files->classes.size()));
        files->classes.push_back(entry.path().filename().string());
    }
    if (files->classes.empty())
        throw Error(
            "ImageFolder",
            fmt::format("{} has no folder in it. Give a folder that has one for every class.", folder));
    files_ = std::move(files);
}

const ImageFolder::Files& ImageFolder::files() const {
    if (!files_) throw Error("ImageFolder", "this dataset was moved from. Use the one that it was moved to.");
    return *files_;
}

std::int64_t ImageFolder::size() const { return static_cast<std::int64_t>(files().paths.size()); }

std::size_t ImageFolder::checked_index(std::int64_t index) const {
    if (index < 0 || index >= size())
        throw Error("ImageFolder", fmt::format("image {} of {} does not exist.", index, size()));
    return static_cast<std::size_t>(index);
}

const std::vector<std::string>& ImageFolder::classes() const { return files().classes; }

const std::string& ImageFolder::path(std::int64_t index) const { return files().paths[checked_index(index)]; }

std::int64_t ImageFolder::label(std::int64_t index) const { return files().labels[checked_index(index)]; }

std::vector<SkippedImage> ImageFolder::skipped() const {
    files();
    const std::lock_guard lock(damage_->mutex);
    std::vector<SkippedImage> all;
    for (const auto& [index, reason] : damage_->reasons) all.push_back({path(index), reason});
    return all;
}

Example ImageFolder::read(std::int64_t index) const {
    Tensor image =
        read_image(path(index), {.channels = options_.channels, .most_pixels = options_.most_pixels});
    Tensor target = Tensor::empty({}, {DType::i64});
    *target.data<std::int64_t>() = label(index);
    return {std::move(image), std::move(target)};
}

Example ImageFolder::get(std::int64_t index, RandomKey) const {
    checked_index(index);
    if (options_.damaged == OnDamaged::stop) return read(index);
    for (std::int64_t tried = 0;; ++tried) {
        const std::int64_t candidate = (index + tried) % size();
        const bool is_last = tried + 1 == size();
        {
            const std::lock_guard lock(damage_->mutex);
            if (damage_->reasons.contains(candidate) && !is_last) continue;
        }
        try {
            return read(candidate);
        } catch (const DamagedImage& damage) {
            const std::lock_guard lock(damage_->mutex);
            if (damage_->reasons.emplace(candidate, damage.reason()).second)
                fmt::print(stderr, "[image] warning: {} is skipped: {}\n", path(candidate), damage.reason());
            if (is_last) throw;
        }
    }
}

}  // namespace potluck::data
