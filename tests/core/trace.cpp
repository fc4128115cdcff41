#include "core/trace.h"

#include <doctest/doctest.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "core/error.h"
#include "core/op_scope.h"
#include "tests/core/temporary_folder.h"

using namespace potluck;
using nlohmann::json;

TEST_CASE("OpScope: the innermost names what runs, per thread") {
    CHECK(std::string(OpScope::current()) == "tensor");
    {
        const OpScope outer("outer");
        CHECK(std::string(OpScope::current()) == "outer");
        {
            const OpScope inner("inner");
            CHECK(std::string(OpScope::current()) == "inner");
            std::string elsewhere;
            std::thread([&] { elsewhere = OpScope::current(); }).join();
            CHECK(elsewhere == "tensor");
        }
        CHECK(std::string(OpScope::current()) == "outer");
    }
    CHECK(std::string(OpScope::current()) == "tensor");
}

TEST_CASE("trace: a file that Chrome loads, with every op, nested and by thread") {
    const test::TemporaryFolder folder;
    const OpScope before("began before the trace");
    CHECK_FALSE(is_tracing());
    start_trace();
    CHECK(is_tracing());
    {
        const OpScope outer("outer");
        const OpScope inner("name with \"quotes\" and \n");
        std::thread([] { const OpScope scope("elsewhere"); }).join();
    }
    trace::record("by hand", trace::now_ns(), trace::now_ns() + 1'500'000);
    write_trace(folder / "trace.json");
    CHECK_FALSE(is_tracing());

    const json file = json::parse(test::read_file(folder / "trace.json"));
    const json& events = file.at("traceEvents");
    CHECK(events.size() == 4);
    std::map<std::string, json> by_name;
    for (const json& event : events) {
        CHECK(event.at("ph") == "X");
        CHECK(event.at("pid").is_number());
        CHECK(event.at("ts").get<double>() >= 0.0);
        CHECK(event.at("dur").get<double>() >= 0.0);
        by_name[event.at("name")] = event;
    }
    const json& outer = by_name.at("outer");
    const json& inner = by_name.at("name with \"quotes\" and \n");
    CHECK(inner.at("tid") == outer.at("tid"));
    CHECK(by_name.at("elsewhere").at("tid") != outer.at("tid"));
    const auto start = [](const json& event) { return event.at("ts").get<double>(); };
    const auto end = [&](const json& event) { return start(event) + event.at("dur").get<double>(); };
    CHECK(start(inner) >= start(outer));
    CHECK(end(inner) <= end(outer) + 0.002);
    CHECK(by_name.at("by hand").at("dur").get<double>() == doctest::Approx(1500).epsilon(0.01));
    CHECK(folder.file_count() == 1);
}

TEST_CASE("trace: an empty one is a valid file too") {
    const test::TemporaryFolder folder;
    start_trace();
    write_trace(folder / "empty.json");
    CHECK(json::parse(test::read_file(folder / "empty.json")).at("traceEvents").empty());
}

TEST_CASE("trace: wrong order is refused, and a failed write loses nothing") {
    const test::TemporaryFolder folder;
    CHECK_THROWS_WITH_AS(write_trace(folder / "t.json"), doctest::Contains("no trace is being recorded"),
                         Error);
    start_trace();
    CHECK_THROWS_WITH_AS(start_trace(), doctest::Contains("being recorded already"), Error);
    { const OpScope scope("kept"); }
    CHECK_THROWS_WITH_AS(write_trace(folder / "no/such/folder/t.json"),
                         doctest::Contains("Create its folder"), Error);
    CHECK(is_tracing());
    write_trace(folder / "t.json");
    CHECK(json::parse(test::read_file(folder / "t.json")).at("traceEvents").at(0).at("name") == "kept");
}

TEST_CASE("trace: many threads at once") {
    const test::TemporaryFolder folder;
    start_trace();
    {
        std::vector<std::jthread> workers;
        for (int i = 0; i < 4; ++i)
            workers.emplace_back([] {
                for (int k = 0; k < 500; ++k) const OpScope scope("busy");
            });
    }
    write_trace(folder / "t.json");
    const json file = json::parse(test::read_file(folder / "t.json"));
    CHECK(file.at("traceEvents").size() == 2000);
    std::set<int> threads;
    for (const json& event : file.at("traceEvents")) threads.insert(event.at("tid").get<int>());
    CHECK(threads.size() == 4);
}

TEST_CASE("trace: counts are curves, also where there is nothing else, and no number that JSON lacks") {
    const test::TemporaryFolder folder;
    trace::count("before", 1.0);
    start_trace();
    trace::count("tokens/s \"here\"", 1234.5);
    trace::count("tokens/s \"here\"", std::numeric_limits<double>::infinity());
    trace::count("tokens/s \"here\"", 0.25);
    write_trace(folder / "trace.json");
    const json events = json::parse(test::read_file(folder / "trace.json")).at("traceEvents");
    REQUIRE(events.size() == 2);
    CHECK(events[0].at("ph") == "C");
    CHECK(events[0].at("name") == "tokens/s \"here\"");
    CHECK(events[0].at("args").at("value") == 1234.5);
    CHECK(events[1].at("args").at("value") == 0.25);
    CHECK(events[0].at("ts").get<double>() <= events[1].at("ts").get<double>());
}
