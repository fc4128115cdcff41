// The main() of every test program, and the reporter whose lines ./test summarises.
//
// With POTLUCK_TEST_RESULTS set to a folder, every test case adds one line to its file POTLUCK_TEST_NAME.tsv:
//     passed|failed|skipped <TAB> name <TAB> reason
// A line `started <TAB> name` is written first, so that a program that dies says in which test.
// POTLUCK_TEST_FILTER keeps the test cases whose name contains it.

#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdlib>
#include <fstream>
#include <string>
#include <string_view>

#include "tests/skip.h"

namespace {

std::string environment(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? std::string() : std::string(value);
}

/// Empty when no results were requested.
std::string result_file_path() {
    const std::string folder = environment("POTLUCK_TEST_RESULTS");
    const std::string name = environment("POTLUCK_TEST_NAME");
    return folder.empty() || name.empty() ? std::string() : folder + "/" + name + ".tsv";
}

class ResultFile : public doctest::IReporter {
public:
    explicit ResultFile(const doctest::ContextOptions& options)
        : options_(options), file_(result_file_path(), std::ios::app) {}

    void test_case_start(const doctest::TestCaseData& test) override {
        name_ = test.m_name;
        write("started", {});
    }
    void test_case_reenter(const doctest::TestCaseData&) override {}
    void test_case_end(const doctest::CurrentTestCaseStats& result) override {
        const std::string skip_reason = potluck::test::take_skip_reason();
        if (result.failure_flags != 0) {
            write("failed", {});
        } else if (!skip_reason.empty()) {
            write("skipped", skip_reason);
        } else {
            write("passed", {});
        }
    }
    void test_case_skipped(const doctest::TestCaseData& test) override {
        // Cases that a filter excluded were not requested. Only a skip() at the case itself is reported.
        const bool asked_for = std::string_view(test.m_name).find(filter_) != std::string_view::npos;
        if (!test.m_skip || options_.no_skip || !asked_for) return;
        name_ = test.m_name;
        write("skipped", test.m_description != nullptr ? test.m_description : "no reason given");
    }

    void report_query(const doctest::QueryData&) override {}
    void test_run_start() override {}
    void test_run_end(const doctest::TestRunStats&) override {}
    void test_case_exception(const doctest::TestCaseException&) override {}
    void subcase_start(const doctest::SubcaseSignature&) override {}
    void subcase_end() override {}
    void log_assert(const doctest::AssertData&) override {}
    void log_message(const doctest::MessageData&) override {}

private:
    void write(std::string_view outcome, std::string_view reason) {
        if (file_.is_open()) file_ << outcome << '\t' << name_ << '\t' << reason << std::endl;
    }

    const doctest::ContextOptions& options_;
    std::ofstream file_;
    std::string filter_ = environment("POTLUCK_TEST_FILTER");
    std::string name_;
};

REGISTER_LISTENER("result_file", 1, ResultFile);

}  // namespace

int main(int argc, char** argv) {
    doctest::Context context;
    const std::string filter = environment("POTLUCK_TEST_FILTER");
    if (!filter.empty()) context.addFilter("test-case", ("*" + filter + "*").c_str());
    context.applyCommandLine(argc, argv);
    return context.run();
}
