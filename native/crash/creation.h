// The making of a segment, killed before each of its system calls and at every instruction behind the seals: whoever
// has the file by then is refused at once, or attaches to a whole segment.
#pragma once

#include <dirent.h>

#include "run.h"

namespace crash {

// The file of the segment that a child makes, opened here; -1: it has none yet.
inline int made_by(pid_t pid) {
    struct stat own{}, other{};
    CHECK(::fstat(mapping()->fd(), &own) == 0);  // the child has this one, too
    const std::string folder = text("/proc/", pid, "/fd");
    DIR* const dir = ::opendir(folder.c_str());
    CHECK(dir != nullptr);
    int found = -1;
    while (const dirent* entry = ::readdir(dir)) {
        const std::string path = text(folder, "/", entry->d_name);
        char name[64] = {};
        if (::readlink(path.c_str(), name, sizeof name - 1) < 0 || std::strstr(name, "memfd:mprollout") == nullptr)
            continue;
        if (::stat(path.c_str(), &other) == 0 && other.st_ino != own.st_ino)
            found = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    }
    ::closedir(dir);
    return found;
}

inline void creation(Counts& counts, std::string& where) {
    mapping();
    const auto creator = [] {
        auto t = std::make_unique<Tracee>(Range{0, 0}, 0, true, [] {
            marker();
            const MappingPtr m = Mapping::create(shape(), "a schema");
            marker();
        });
        t->run_to_marker();
        return t;
    };
    creator()->record(true);  // the first fork of a heap takes other private ways than those behind it
    const Recording r = creator()->record(true);
    unsigned none = 0, refused = 0, whole = 0;
    for (std::size_t i = 0; i < r.points.size(); ++i) {
        const bool sealing = i + 2 >= r.points.size();
        for (unsigned more = 0; more < (sealing ? std::max(1U, r.gaps[i]) : 1); ++more) {
            Point p = r.points[i];
            p.more = more;
            where = text("killed at point ", i, " of ", r.points.size(), ", ", describe(p));
            const auto t = creator();
            t->go(p);
            const int fd = made_by(t->pid());
            t->kill();
            ++counts.kills;
            const std::int64_t before = now_ns();
            try {
                const MappingPtr m = Mapping::attach(fd);
                CHECK(m->schema() == "a schema" && snapshot(*m).empty() && Producer(m, 0).free_bytes() == kArena);
                ++whole;
            } catch (const SegmentError&) {
                CHECK(whole == 0);  // once it is whole it stays so
                ++(fd < 0 ? none : refused);
            }
            CHECK(now_ns() - before < 1000000000);
            ::close(fd);
        }
    }
    CHECK(none > 0 && refused > 0 && whole > 0);
    std::printf("%-62s %5llu kills: %u without a file, %u refused, %u whole", "making a segment",
                static_cast<unsigned long long>(counts.kills), none, refused, whole);
}

}  // namespace crash
