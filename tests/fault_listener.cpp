// With the emulated CUDA device: a fault that the emulator recorded during a test case, and no test has taken, fails
// the case.

#include <doctest/doctest.h>

#include <string>

#include "tests/cuda_emulator/emulator.h"

namespace {

class FaultListener : public doctest::IReporter {
public:
    explicit FaultListener(const doctest::ContextOptions&) {}

    void test_case_start(const doctest::TestCaseData& test) override { name_ = test.m_name; }
    void test_case_end(const doctest::CurrentTestCaseStats&) override {
        for (const auto& fault : potluck::emulator::take_faults())
            ADD_FAIL_CHECK_AT(__FILE__, __LINE__, "the emulator saw in \"" << name_ << "\": " << fault.text);
    }

    void report_query(const doctest::QueryData&) override {}
    void test_run_start() override {}
    void test_run_end(const doctest::TestRunStats&) override {}
    void test_case_reenter(const doctest::TestCaseData&) override {}
    void test_case_exception(const doctest::TestCaseException&) override {}
    void subcase_start(const doctest::SubcaseSignature&) override {}
    void subcase_end() override {}
    void log_assert(const doctest::AssertData&) override {}
    void log_message(const doctest::MessageData&) override {}
    void test_case_skipped(const doctest::TestCaseData&) override {}

private:
    std::string name_;
};

}  // namespace

REGISTER_LISTENER("emulator_faults", 1, FaultListener);
