// Does the instruction at hand touch a range of memory? Just enough x86-64 decoding to answer that before it runs.
//
// It may say yes too often (a needless stop), never no where the answer is yes: tracee.h compares the range after every
// single step and fails when a byte changed under an instruction that was cleared here.
#pragma once

#include <sys/user.h>

#include <cstdint>
#include <cstring>

namespace crash {

struct Range {
    std::uint64_t low, high;
    bool near(std::uint64_t at) const { return at < high && at + 64 > low; }  // 64: the widest operand
};

inline const unsigned char* code_at(std::uint64_t rip) { return reinterpret_cast<const unsigned char*>(rip); }
inline bool is_syscall(std::uint64_t rip) { return code_at(rip)[0] == 0x0f && code_at(rip)[1] == 0x05; }
inline bool is_marker(std::uint64_t rip) { return code_at(rip)[0] == 0xcc; }

// Whether opcode `op` of the one-byte map has a ModRM byte.
inline bool has_modrm(unsigned op) {
    if (op < 0x40) return (op & 7) < 4;
    return op == 0x63 || op == 0x69 || op == 0x6b || (op >= 0x80 && op <= 0x8f) || op == 0xc0 || op == 0xc1 ||
           op == 0xc6 || op == 0xc7 || (op >= 0xd0 && op <= 0xd3) || (op >= 0xd8 && op <= 0xdf) || op == 0xf6 ||
           op == 0xf7 || op == 0xfe || op == 0xff;
}
inline bool has_modrm_0f(unsigned op) {
    return !(op == 0x05 || op == 0x0b || op == 0x31 || op == 0x77 || op == 0xa2 || (op >= 0x80 && op <= 0x8f) ||
             (op >= 0xa0 && op <= 0xa2) || (op >= 0xa8 && op <= 0xaa) || (op >= 0xc8 && op <= 0xcf));
}

inline bool touches(const user_regs_struct& r, Range range) {
    const unsigned long long general[16] = {r.rax, r.rcx, r.rdx, r.rbx, r.rsp, r.rbp, r.rsi, r.rdi,
                                            r.r8,  r.r9,  r.r10, r.r11, r.r12, r.r13, r.r14, r.r15};
    const unsigned char* p = code_at(r.rip);
    for (;; ++p) {
        if (*p == 0x64 || *p == 0x65) return false;  // fs, gs: thread-local, private
        if (*p != 0x66 && *p != 0xf2 && *p != 0xf3 && *p != 0xf0 && *p != 0x2e && *p != 0x3e) break;
    }
    unsigned map = 0, index_high = 0, base_high = 0, disp8_scale = 1;
    if (*p == 0xc5) {  // VEX, two bytes
        map = 1;
        p += 2;
    } else if (*p == 0xc4 || *p == 0x62) {  // VEX, three bytes; EVEX, which scales an 8-bit displacement
        map = p[1] & 7;
        index_high = p[1] & 0x40 ? 0 : 8;
        base_high = p[1] & 0x20 ? 0 : 8;
        if (*p == 0x62) disp8_scale = 16u << (p[3] >> 5 & 3);
        p += *p == 0x62 ? 4 : 3;
    } else {
        if ((*p & 0xf0) == 0x40) {  // REX
            index_high = *p & 2 ? 8 : 0;
            base_high = *p & 1 ? 8 : 0;
            ++p;
        }
        if (*p == 0x0f) {
            map = 1;
            ++p;
            if (*p == 0x38 || *p == 0x3a) map = *p++ == 0x38 ? 2 : 3;
        }
    }
    const unsigned op = *p++;
    if (map == 0) {
        if ((op >= 0xa4 && op <= 0xa7) || (op >= 0xaa && op <= 0xaf))  // movs, cmps, stos, lods, scas
            return range.near(r.rsi) || range.near(r.rdi);
        if (op == 0x8d || !has_modrm(op)) return false;  // lea only computes
    } else if (map == 1) {
        if ((op >= 0x18 && op <= 0x1f) || !has_modrm_0f(op)) return false;  // hints and long nops
    }
    const unsigned modrm = *p++, mod = modrm >> 6, rm = modrm & 7;
    if (mod == 3 || (mod == 0 && rm == 5)) return false;  // a register; relative to rip, so private
    std::uint64_t at = 0;
    bool base = true;
    if (rm == 4) {  // SIB
        const unsigned sib = *p++, index = (sib >> 3 & 7) | index_high;
        if (index != 4) at += general[index] << (sib >> 6);
        base = !(mod == 0 && (sib & 7) == 5);
        if (base) at += general[(sib & 7) | base_high];
    } else {
        at += general[rm | base_high];
    }
    if (mod == 1) {
        at += static_cast<std::int64_t>(static_cast<signed char>(*p)) * disp8_scale;
    } else if (mod == 2 || !base) {
        std::int32_t disp;
        std::memcpy(&disp, p, sizeof disp);
        at += static_cast<std::int64_t>(disp);
    }
    return range.near(at);
}

}  // namespace crash
