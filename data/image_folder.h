#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/options.h"
#include "data/dataset.h"
#include "data/image.h"

namespace potluck::data {

/// What an image that cannot be read does: its Error ends the loop, or another one takes its place.
enum class OnDamaged : std::uint8_t { stop, skip };

struct ImageFolderOptions {
    OnDamaged damaged = OnDamaged::stop;
    std::int64_t channels = 3;               // of all images: see ImageOptions
    std::int64_t most_pixels = 100'000'000;  // see ImageOptions
};

/// An image that was skipped, and why.
struct SkippedImage {
    std::string path, reason;
};

/// The images of a folder that has a folder for every class:
///
///     photos/cat/1.jpg, photos/cat/night/2.png, photos/dog/1.jpeg
///
/// Classes are numbered in the order of their names (by bytes), images in that of their paths within the class, so the
/// numbers are the same on every machine. Items are (u8 (height, width, channels), i64 without axes: the class). Whatever is
/// random or makes all images of one size is an ImageTransform's: TransformedDataset(ImageFolder(...), ImageTransform(...)).
///
/// Images are the files that are named .png, .jpg or .jpeg, in letters of either case, also below subfolders of a class;
/// what is in them says which of the formats they are. Names that begin with a dot, and files that are named otherwise, are
/// left out. Symbolic links are followed where they lead to a class or to a file.
///
/// With OnDamaged::skip, the image after it in the dataset's order (after the last one the first) whose file can be read
/// takes the place of a damaged one, with its own class. So an item depends on its number alone: batches keep their sizes,
/// any number of workers and any share give the same, and a resumed run goes on with the same items. Each skipped file is
/// named on standard error when it is first met.
class ImageFolder final : public Dataset {
public:
    /// Reads names, no images. Throws Error when the folder cannot be read, has no class, or a class no image.
    explicit ImageFolder(const std::string& folder, ImageFolderOptions options = {});
    template <std::size_t N>
    ImageFolder(const std::string&, MistypedOptions<N>) = delete;  // no such option: see ImageFolderOptions

    std::int64_t size() const override;
    /// Throws DamagedImage, with skip only when no image of the folder can be read; Error when the file cannot be opened.
    Example get(std::int64_t index, RandomKey key) const override;

    const std::vector<std::string>& classes() const;
    const std::string& path(std::int64_t index) const;
    /// The number of the class of an image.
    std::int64_t label(std::int64_t index) const;
    /// The images that were skipped so far, by this dataset and all copies of it, in the dataset's order.
    std::vector<SkippedImage> skipped() const;

private:
    struct Files;
    struct Damage;

    const Files& files() const;  // throws Error when this was moved from
    std::size_t checked_index(std::int64_t index) const;
    Example read(std::int64_t index) const;

    ImageFolderOptions options_;
    std::shared_ptr<const Files> files_;
    std::shared_ptr<Damage> damage_;  // that was met so far
};

}  // namespace potluck::data
