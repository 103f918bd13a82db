// A child process that is run to an exact instruction, and there killed, or stopped and continued.
//
// The interesting part of the child lies between two markers. One run of it is single-stepped and recorded: a *point* lies
// before each instruction that touches the shared mapping or enters the kernel, and at the end. What runs between two points
// is private to the child: it dies with it, and while it is stopped nobody can tell. So one stop at each point stands for
// every instruction, reads included. Later runs reach a point by a breakpoint: a single step costs 10 to 40 us.
#pragma once

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "operand.h"
#include "segment.h"

namespace crash {

struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

#define CHECK(x) ((x) ? void() : throw crash::Failure(mprollout::text(__FILE__, ":", __LINE__, ": failed: ", #x)))

// In the child: the first ones let the parent act in between, the last two enclose what is stepped.
[[gnu::always_inline]] inline void marker() { asm volatile("int3" ::: "memory"); }

struct Point {
    std::uint64_t at = 0;  // address of the instruction that comes next; 0: the first marker
    unsigned hit = 0;      // its hit-th execution that touches shared memory or enters the kernel
    unsigned more = 0;     // and this many instructions further
    bool end = false;      // the last marker
    bool system_call = false;
    bool fresh = true;  // shared bytes changed since the point before, payloads aside
};

struct Recording {
    std::vector<Point> points;
    std::vector<unsigned> gaps;  // instructions from this point to the next
    std::uint64_t instructions = 0;
};

// Some containers forbid it.
inline bool may_trace() {
    const pid_t pid = ::fork();
    if (pid == 0) ::_exit(::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) == 0 ? 0 : 1);
    int status = 0;
    return pid > 0 && ::waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

class Tracee {
public:
    // `payloads`: where they start in the shared range, behind all words that anybody decides by.
    template <class Body>
    Tracee(Range shared, std::uint64_t payloads, bool traced, Body body)
        : shared_(shared), payloads_(payloads), traced_(traced) {
        std::fflush(nullptr);
        pid_ = ::fork();
        CHECK(pid_ >= 0);
        if (pid_ == 0) {
            ::prctl(PR_SET_PDEATHSIG, SIGKILL);
            struct sigaction ignore{};
            ignore.sa_handler = [](int) {};  // a marker is nothing once the parent has let go
            ::sigaction(SIGTRAP, &ignore, nullptr);
            if (traced) ::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
            try {
                body();
            } catch (const std::exception& e) {
                std::fprintf(stderr, "child: %s\n", e.what());
                ::_exit(3);
            }
            ::_exit(0);  // no destructor: the copies of the parent's handles are not this process's
        }
        pidfd_ = static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0));
        CHECK(pidfd_ >= 0);
    }
    ~Tracee() {
        if (!gone_) {
            ::kill(pid_, SIGKILL);
            for (int status = 0; ::waitpid(pid_, &status, __WALL) == pid_ && WIFSTOPPED(status);) {
            }
        }
        ::close(pidfd_);
    }
    Tracee(const Tracee&) = delete;
    Tracee& operator=(const Tracee&) = delete;

    pid_t pid() const { return pid_; }

    void run_to_marker() { CHECK(resume_to_trap() && is_marker(registers().rip - 1)); }

    // From the first marker to the last. `alone`: nobody else writes the shared range meanwhile.
    Recording record(bool alone) {
        Recording out;
        std::map<std::uint64_t, unsigned> hits;
        std::string image = bytes();
        out.points.push_back(Point{});
        out.gaps.push_back(0);
        bool changed = false;
        for (;;) {
            const user_regs_struct r = registers();
            const bool end = is_marker(r.rip), stop = end || stops(r);
            if (stop) {
                out.points.push_back(Point{r.rip, end ? 0 : ++hits[r.rip], 0, end, is_syscall(r.rip), changed});
                out.gaps.push_back(0);
                changed = false;
            }
            if (end) return out;
            if (r.rip == long_and_private())
                step_over(r);
            else
                step();
            ++out.instructions;
            ++out.gaps.back();
            if (std::memcmp(image.data(), code_at(shared_.low), image.size()) == 0) continue;
            if (alone && !stop)
                throw Failure(mprollout::text("operand.h cleared the instruction at ", r.rip, ", which wrote"));
            changed |= std::memcmp(image.data(), code_at(shared_.low), payloads_ - shared_.low) != 0;
            image = bytes();
        }
    }

    void go(const Point& p) {
        if (p.end) {
            run_to_marker();
            return;
        }
        if (p.at != 0) {
            const long word = peek(p.at);
            const long trap = (word & ~0xffL) | 0xcc;
            for (unsigned hit = 0;;) {
                poke(p.at, trap);
                CHECK(resume_to_trap());
                user_regs_struct r = registers();
                if (r.rip - 1 != p.at) throw Failure("the child took another way than when it was recorded");
                r.rip = p.at;
                CHECK(::ptrace(PTRACE_SETREGS, pid_, nullptr, &r) == 0);
                poke(p.at, word);
                if (stops(r) && ++hit == p.hit) break;
                step();
            }
        }
        // Private ways, malloc's say, may be shorter than when they were recorded.
        for (unsigned i = 0; i < p.more && !is_marker(next_instruction()); ++i) step();
    }

    void kill() {
        CHECK(::kill(pid_, SIGKILL) == 0);
        int status = 0;
        do CHECK(::waitpid(pid_, &status, __WALL) == pid_);
        while (WIFSTOPPED(status));
        gone_ = true;
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    }

    // Lets go of it, stopped: SIGSTOP is pending before it can run another instruction.
    void stop() {
        CHECK(::kill(pid_, SIGSTOP) == 0);
        release();
        int status = 0;
        CHECK(::waitpid(pid_, &status, WUNTRACED) == pid_ && WIFSTOPPED(status) && WSTOPSIG(status) == SIGSTOP);
    }
    void resume() { CHECK(::kill(pid_, SIGCONT) == 0); }
    void release() {
        CHECK(::ptrace(PTRACE_DETACH, pid_, nullptr, nullptr) == 0);
        traced_ = false;
    }

    // False: it still runs after `ms`.
    bool ends_within(int ms) {
        pollfd p{pidfd_, POLLIN, 0};
        if (::poll(&p, 1, ms) <= 0) return false;
        int status = 0;
        CHECK(::waitpid(pid_, &status, __WALL) == pid_);
        gone_ = true;
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
            throw Failure(mprollout::text("the child that went on ended with status ", status));
        return true;
    }

    // Until it sleeps in the kernel or has ended.
    void until_asleep() const {
        for (;; ::usleep(50)) {
            char path[32], line[256] = {};
            std::snprintf(path, sizeof path, "/proc/%d/stat", pid_);
            std::FILE* f = std::fopen(path, "r");
            if (f == nullptr) return;
            const std::size_t n = std::fread(line, 1, sizeof line - 1, f);
            std::fclose(f);
            const char* name_end = n > 0 ? std::strrchr(line, ')') : nullptr;
            if (name_end == nullptr || name_end[2] == 'S' || name_end[2] == 'Z') return;
        }
    }

private:
    user_regs_struct registers() const {
        user_regs_struct r{};
        CHECK(::ptrace(PTRACE_GETREGS, pid_, nullptr, &r) == 0);
        return r;
    }
    std::uint64_t next_instruction() const {
        return static_cast<std::uint64_t>(
            ::ptrace(PTRACE_PEEKUSER, pid_, offsetof(user, regs) + offsetof(user_regs_struct, rip), nullptr));
    }
    bool stops(const user_regs_struct& r) const { return is_syscall(r.rip) || touches(r, shared_); }
    std::string bytes() const {
        return std::string(reinterpret_cast<const char*>(shared_.low), shared_.high - shared_.low);
    }
    long peek(std::uint64_t at) const { return ::ptrace(PTRACE_PEEKTEXT, pid_, at, nullptr); }
    void poke(std::uint64_t at, long word) const { CHECK(::ptrace(PTRACE_POKETEXT, pid_, at, word) == 0); }

    // Most of a take-over's instructions: it parses /proc/PID/stat. Touches nothing shared, makes no system call.
    static std::uint64_t long_and_private() {
        return reinterpret_cast<std::uint64_t>(static_cast<int (*)(const char*, const char*, ...)>(&std::sscanf));
    }
    // At the first instruction of a function: to its return address.
    void step_over(const user_regs_struct& at_entry) {
        const auto back = static_cast<std::uint64_t>(peek(at_entry.rsp));
        const long word = peek(back);
        poke(back, (word & ~0xffL) | 0xcc);
        CHECK(resume_to_trap());
        user_regs_struct r = registers();
        CHECK(r.rip - 1 == back);
        r.rip = back;
        CHECK(::ptrace(PTRACE_SETREGS, pid_, nullptr, &r) == 0);
        poke(back, word);
    }

    bool wait_for_trap() {
        int status = 0;
        CHECK(::waitpid(pid_, &status, __WALL) == pid_);
        if (WIFEXITED(status) || WIFSIGNALED(status)) gone_ = true;
        return WIFSTOPPED(status) && WSTOPSIG(status) == SIGTRAP;
    }
    // Suppresses the SIGTRAP of the stop before, and runs to the next.
    bool resume_to_trap() {
        if (started_) CHECK(::ptrace(PTRACE_CONT, pid_, nullptr, nullptr) == 0);
        started_ = true;
        return wait_for_trap();
    }
    void step() {
        CHECK(::ptrace(PTRACE_SINGLESTEP, pid_, nullptr, nullptr) == 0);
        CHECK(wait_for_trap());
    }

    Range shared_;
    std::uint64_t payloads_;
    bool traced_, started_ = false, gone_ = false;
    pid_t pid_ = -1;
    int pidfd_ = -1;
};

}  // namespace crash
