#pragma once

// Shared code of the tests of nn/.

#include <doctest/doctest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/tensor.h"
#include "tests/expect_error.h"

namespace potluck::test {

/// A folder that is removed with its content at the end of the test.
class TemporaryFolder {
public:
    TemporaryFolder() {
        static int count = 0;
        path_ = std::filesystem::temp_directory_path() /
                ("potluck_nn_" + std::to_string(getpid()) + "_" + std::to_string(count++));
        std::filesystem::create_directories(path_);
    }
    ~TemporaryFolder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    TemporaryFolder(const TemporaryFolder&) = delete;
    TemporaryFolder& operator=(const TemporaryFolder&) = delete;

    std::string operator/(const std::string& name) const { return (path_ / name).string(); }
    std::string path() const { return path_.string(); }

private:
    std::filesystem::path path_;
};

inline std::string read_file(const std::string& path) {
    std::ifstream stream(path, std::ios::binary);
    std::ostringstream content;
    content << stream.rdbuf();
    return content.str();
}

inline void write_file(const std::string& path, const std::string& content) {
    std::ofstream(path, std::ios::binary) << content;
}

inline std::vector<nlohmann::json> read_lines(const std::string& path) {
    std::vector<nlohmann::json> lines;
    std::ifstream stream(path);
    for (std::string line; std::getline(stream, line);) lines.push_back(nlohmann::json::parse(line));
    return lines;
}

/// Checks that `function` throws an Error whose text contains all of `parts`, at the latest when the devices have
/// finished the work that it started.
template <class Function>
void check_error(Function&& function, const std::vector<std::string>& parts) {
    std::string text;
    try {
        function();
        wait_for_devices();
    } catch (const Error& error) {
        text = error.what();
    }
    INFO("error: ", text);
    REQUIRE_FALSE(text.empty());
    for (const std::string& part : parts) {
        INFO("looked for: ", part);
        CHECK(text.find(part) != std::string::npos);
    }
}

/// Whether both contain the same values, bit for bit except for the sign of zero.
inline bool same(const Tensor& a, const Tensor& b) {
    return a.shape() == b.shape() && a.dtype() == b.dtype() && a.to_vector<double>() == b.to_vector<double>();
}

/// The largest difference of two tensors of one shape, relative to the largest magnitude in `expected`.
inline double relative_error(const Tensor& actual, const Tensor& expected) {
    REQUIRE(actual.shape() == expected.shape());
    const std::vector<double> a = actual.to_vector<double>(), b = expected.to_vector<double>();
    double difference = 0.0, largest = 0.0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        if (!(std::abs(a[i] - b[i]) <= difference)) difference = std::abs(a[i] - b[i]);
        largest = std::max(largest, std::abs(b[i]));
    }
    return largest == 0.0 ? difference : difference / largest;
}

}  // namespace potluck::test
