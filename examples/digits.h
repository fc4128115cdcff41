#pragma once

// The handwritten digits of examples/data, for the programs that learn to read them.

#include <potluck.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

namespace digits {

using potluck::Tensor;

/// Images (count, 64) between 0 and 1, and labels (count).
struct Digits {
    Tensor images, labels;
};

/// Every line is a label, a blank and 64 pixels from '0' (no ink) to 'G' (16).
inline Digits read_digits(const std::string& path) {
    const std::string levels = "0123456789ABCDEFG";
    std::ifstream file(path);
    if (!file)
        throw potluck::Error("read_digits",
                             "cannot read " + path + ". Start this program in the root of the sources.");
    std::vector<double> pixels;
    std::vector<std::int64_t> labels;
    for (std::string line; std::getline(file, line);) {
        const auto wrong = [&](char c) { return levels.find(c) == std::string::npos; };
        if (line.size() != 66 || line[0] < '0' || line[0] > '9' ||
            std::any_of(line.begin() + 2, line.end(), wrong))
            throw potluck::Error("read_digits",
                                 path + ": line " + std::to_string(labels.size() + 1) + " is no digit.");
        labels.push_back(line[0] - '0');
        for (char c : line.substr(2)) pixels.push_back(static_cast<double>(levels.find(c)) / 16);
    }
    const auto count = static_cast<std::int64_t>(labels.size());
    return {potluck::tensor(pixels, {count, 64}), potluck::tensor(labels, {count})};
}

/// The images for training, and those for testing.
struct Split {
    Digits train, test;
};

/// The last 360 images are reserved for the test: the network is never trained on them.
inline Split split(const Digits& all) {
    const std::int64_t test_count = 360, train_count = all.labels.count() - test_count;
    if (train_count < 1) throw potluck::Error("split", "360 digits are for the test, and there are no more.");
    const auto part = [&](std::int64_t first, std::int64_t count) {
        return Digits{all.images.narrow(0, first, count), all.labels.narrow(0, first, count)};
    };
    return {part(0, train_count), part(train_count, test_count)};
}

}  // namespace digits
