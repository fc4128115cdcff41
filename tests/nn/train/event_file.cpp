// TensorBoard's event files. tests/scripts/tensorboard.py lets TensorBoard itself read them.

#include "nn/train/event_file.h"

#include <doctest/doctest.h>

#include <filesystem>
#include <vector>

#include "core/error.h"
#include "tests/nn/support.h"

namespace potluck::test {
namespace {

namespace fs = std::filesystem;

constexpr const char* first = "events.out.tfevents.00000.potluck";
constexpr const char* second = "events.out.tfevents.00001.potluck";

void append(EventFile& file, std::int64_t step, double value) {
    const std::vector<EventScalar> scalars = {{"loss/train", value}};
    file.append(step, 1764588000.0, scalars);
}

}  // namespace

TEST_CASE("event file: the checksum is CRC-32C") {
    CHECK(crc32c("") == 0);
    CHECK(crc32c("123456789") == 0xe3069283U);
    CHECK(crc32c(std::string(32, '\0')) == 0x8a9136aaU);  // this and the next: RFC 3720, B.4
    CHECK(crc32c(std::string(32, '\xff')) == 0x62a8ab43U);
}

TEST_CASE("event file: the same bytes as TensorBoard's own writer makes") {
    const TemporaryFolder folder;
    {
        EventFile file(folder.path(), 0, 1764588000.25);
        const std::vector<EventScalar> one = {{"loss/train", 2.5}, {"throughput/mfu", 0.25}};
        file.append(1, 1764588000.5, one);
        const std::vector<EventScalar> other = {
            {"loss/train", -1e-8}, {"loss/validation", 1e30}, {"time/data", 0.0}};
        file.append(300, 1764588001.75, other);
        const std::vector<EventScalar> last = {
            {std::string_view("a name of more than 127 bytes, so that its length "
                              "takes two: ........................................"
                              "........................................"),
             1.0}};
        file.append(std::int64_t{1} << 40, 1764588002.0, last);
    }
    CHECK(read_file(folder / first) == read_file("tests/golden/events.tfevents"));
}

TEST_CASE("event file: who goes on writes another file, and cuts off what is void in those before") {
    const TemporaryFolder folder;
    const auto sizes = [&] {
        std::vector<std::uintmax_t> bytes;
        for (const char* name : {first, second})
            if (fs::exists(folder / name)) bytes.push_back(fs::file_size(folder / name));
        return bytes;
    };
    std::vector<std::uintmax_t> after;  // bytes after each step
    {
        EventFile file(folder.path(), 0, 1.0);
        after.push_back(sizes()[0]);
        for (std::int64_t step = 1; step <= 5; ++step) {
            append(file, step, 0.5);
            after.push_back(sizes()[0]);
        }
    }
    const std::string whole = read_file(folder / first);
    for (const std::int64_t resumed_at : {5, 3, 0}) {
        for (const std::string& tail : {std::string(), whole.substr(after[2], 20), std::string(40, 'x')}) {
            INFO("resumed at ", resumed_at, " with ", tail.size(), " bytes of a dying process");
            fs::remove(folder / second);
            write_file(folder / first, whole + tail);
            EventFile file(folder.path(), resumed_at, 1.0);
            append(file, resumed_at + 1, 0.5);
            REQUIRE(sizes().size() == 2);
            CHECK(read_file(folder / first) == whole.substr(0, after[static_cast<std::size_t>(resumed_at)]));
            CHECK(sizes()[1] == after[1]);  // its header and one step
        }
    }
    // One that is damaged in the middle says nothing behind the damage.
    std::string damaged = whole;
    damaged[after[2] + 20] ^= 1;
    write_file(folder / first, damaged);
    EventFile file(folder.path(), 4, 1.0);
    CHECK(sizes()[0] == after[2]);
}

TEST_CASE("event file: other files in the folder are left alone, and no name is taken twice") {
    const TemporaryFolder folder;
    write_file(folder / "events.out.tfevents.1700000000.host", "somebody else's");
    write_file(folder / second, "");
    { EventFile file(folder.path(), 0, 1.0); }
    CHECK(read_file(folder / "events.out.tfevents.1700000000.host") == "somebody else's");
    CHECK(fs::exists(folder / "events.out.tfevents.00002.potluck"));
    write_file(folder / "file", "");
    check_error([&] { EventFile(folder / "file/below", 0, 1.0); }, {"[event_file]", "cannot"});
}

}  // namespace potluck::test
