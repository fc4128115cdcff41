// The report page as text; tests/scripts/report.py opens one in a browser.

#include "nn/train/report.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "core/factories.h"
#include "data/image.h"
#include "nn/train/chart.h"
#include "tests/expect_error.h"

namespace potluck::test {
namespace {

StepMetrics line(std::int64_t step, double loss) {
    StepMetrics metrics{.step = step, .loss = loss, .learning_rate = 0.1, .gradient_norm = 1.0};
    metrics.tokens = 640;
    metrics.samples = 10;
    metrics.seconds = 0.01;
    metrics.tokens_per_second = 64'000;
    metrics.samples_per_second = 1000;
    metrics.mfu = 0.25;
    metrics.time[Phase::data] = 0.004;
    metrics.time[Phase::forward] = 0.006;
    return metrics;
}

std::size_t count(const std::string& text, const std::string& part) {
    std::size_t found = 0;
    for (std::size_t place = text.find(part); place != std::string::npos; place = text.find(part, place + 1))
        ++found;
    return found;
}

/// The bytes of base64 (RFC 4648).
std::string decoded_base64(const std::string& text) {
    constexpr std::string_view digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    REQUIRE(text.size() % 4 == 0);
    std::string bytes;
    std::uint32_t bits = 0;
    int count = 0;
    for (const char letter : text.substr(0, text.find('='))) {
        const std::size_t value = digits.find(letter);
        REQUIRE(value != std::string_view::npos);
        bits = bits << 6 | static_cast<std::uint32_t>(value);
        count += 6;
        if (count < 8) continue;
        count -= 8;
        bytes += static_cast<char>(bits >> count & 0xff);
    }
    return bytes;
}

/// Faults that no page may have, whatever it shows.
void check_page(const std::string& html) {
    CHECK(html.starts_with("<!doctype html>"));
    CHECK(html.ends_with("</html>\n"));
    for (const char* wrong :
         {"<script", "http:", "https:", "@import", "url(", "<link", "nan", "inf\"", "inf,", "-inf"}) {
        INFO(wrong);
        CHECK_FALSE(contains(html, wrong));
    }
    for (const char* tag : {"div", "svg", "table", "tr", "td", "p", "h2", "title", "text", "figure", "b"}) {
        INFO(tag);
        const std::string name = tag;
        CHECK(count(html, "<" + name + ">") + count(html, "<" + name + " ") ==
              count(html, "</" + name + ">"));
    }
}

}  // namespace

TEST_CASE("report: text is shown as text") {
    CHECK(escaped("a < b & c > \"d\" 'e'") == "a &lt; b &amp; c &gt; &quot;d&quot; &#39;e&#39;");
    CHECK(escaped("h\xc3\xa4 \xe2\x82\xac \xf0\x9f\x98\x80") == "h\xc3\xa4 \xe2\x82\xac \xf0\x9f\x98\x80");
    const std::string mark = "\xef\xbf\xbd";
    CHECK(escaped("\x01\n\t\xff") == mark + "\n\t" + mark);
    CHECK(escaped("cut \xe2\x82") == "cut " + mark + mark);
    CHECK(escaped("\xc0\xaf") == mark + mark);  // a slash in two bytes
    CHECK(escaped("").empty());
}

TEST_CASE("report: numbers are short") {
    CHECK(short_number(0.0) == "0");
    CHECK(short_number(0.25) == "0.25");
    CHECK(short_number(-2.5) == "-2.5");
    CHECK(short_number(2400) == "2400");
    CHECK(short_number(48'210) == "48.21k");
    CHECK(short_number(1.5e6) == "1.5M");
    CHECK(short_number(2e9) == "2G");
    CHECK(short_number(3e-4) == "0.0003");
}

TEST_CASE("report: holds what was measured, and the settings") {
    RunHistory history;
    for (std::int64_t step = 1; step <= 50; ++step) {
        StepMetrics metrics = line(step, 5.0 / static_cast<double>(step));
        if (step % 10 == 0) metrics.validation_loss = 6.0 / static_cast<double>(step);
        metrics.resumed = step == 21;
        history.add(metrics);
    }
    CHECK(history.steps == 50);
    CHECK(history.counts_tokens);
    CHECK(history.total[Phase::data] == doctest::Approx(0.2));
    TrainingSummary summary;
    summary.final_train_loss = 0.1;
    summary.final_val_loss = 0.12;
    summary.tokens_per_second = 64'000;
    summary.samples_per_second = 1000;
    summary.mfu = 0.25;
    summary.mfu_formula = "flops * tokens < peak";
    summary.peak_memory_bytes = summary.memory.peak = 20'000'000;
    summary.memory.parameters = 5'000'000;
    summary.memory.by_op = {{"linear", 15'000'000}, {"softmax", 5'000'000}};
    summary.bottleneck = Bottleneck{Bottleneck::Kind::input, "The training waits for data 40 % of its time."};
    const std::string html = report_page(history, {.title = "runs/<b>one</b>",
                                                   .status = "finished",
                                                   .summary = summary,
                                                   .settings = {{"--text", "<script>alert(1)</script>"}}});
    check_page(html);
    for (const char* part :
         {"runs/&lt;b&gt;one&lt;/b&gt;", "The limit is input.", "waits for data 40 %", "64.0k", "25.0 %",
          "20.0 MB", "0.1000", "0.1200", "MFU = flops * tokens &lt; peak", "waiting for data", "0.20 s",
          "40.0 %", "linear", "75.0 %", "&lt;script&gt;alert(1)&lt;/script&gt;", "resumed at step 21",
          "validation 0.12 at step 50"}) {
        INFO(part);
        CHECK(contains(html, part));
    }
    CHECK(count(html, "<circle") == 5);  // the validations
}

TEST_CASE("report: nothing, one step, values that are not finite, lines of an older version") {
    RunHistory history;
    check_page(report_page(history, {}));
    CHECK(count(report_page(history, {}), "no values yet") == 6);
    StepMetrics metrics = line(1, 5.0);
    metrics.gradient_norm = std::numeric_limits<double>::infinity();
    metrics.validation_loss = std::nan("");
    history.add(metrics);
    std::string html = report_page(history, {});
    check_page(html);
    CHECK(contains(html, "training 5 at step 1"));
    CHECK(contains(html, "2 values are not finite"));
    history.add({.step = 2, .loss = 4.0, .tokens = 5, .seconds = 1.0, .tokens_per_second = 5.0});
    html = report_page(history, {});
    check_page(html);
    CHECK(history.time[0].buckets().size() == 1);
}

TEST_CASE("report: a run of 100,000 steps makes a page of the same size, and its spikes are seen") {
    RunHistory history;
    for (std::int64_t step = 1; step <= 100'000; ++step) history.add(line(step, step == 50'000 ? 1e6 : 2.0));
    const std::string html = report_page(history, {.title = "long"});
    check_page(html);
    CHECK(html.size() < 400'000);
    CHECK(contains(html, "class=\"band\""));
    CHECK(contains(html, ">1M<"));  // the axis reaches up to the spike
    CHECK(history.total[Phase::forward] == doctest::Approx(600.0));
}

TEST_CASE("report: pictures stand in the page itself, and wrong ones are marked") {
    const Tensor image = tensor(std::vector<std::uint8_t>{0, 128, 255, 7, 8, 9}, {1, 2, 3});
    const std::string html = report_page({}, {.pictures = {{image, "cat", "cat"}, {image, "a<b", "dog"}}});
    check_page(html);
    CHECK(count(html, "src=\"data:image/png;base64,iVBORw0KGgo") == 2);
    CHECK(count(html, "<figure class=\"wrong\">") == 1);
    CHECK(contains(html, "a&lt;b, not dog"));
    for (const Tensor& wrong :
         {ones({2, 2, 3}), Tensor(), zeros({2, 2}, {DType::u8}), zeros({0, 2, 1}, {DType::u8})})
        CHECK(contains(error_of([&] { report_page({}, {.pictures = {{wrong, "", ""}}}); }), "[encode_png] "));
}

TEST_CASE("report: the pictures of the page are those that were given") {
    for (const std::int64_t width : {1, 2, 3, 40}) {  // so that base64 ends in each of its three ways
        const Tensor image = randint(0, 256, {2, width, 1}, {DType::u8});
        const std::string html = report_page({}, {.pictures = {{image, "cat", "cat"}}});
        const std::string start = "src=\"data:image/png;base64,";
        const std::size_t begin = html.find(start) + start.size();
        const std::string file = decoded_base64(html.substr(begin, html.find('"', begin) - begin));
        CHECK(data::decode_image(file).to_vector() == image.to_vector());
    }
}

}  // namespace potluck::test
