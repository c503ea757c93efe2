// A plugin of qemu-user that counts executed instructions: all, and vector operations without loads, stores and moves
// of whole registers.
//
// The prototypes are those of qemu-plugin.h (QEMU 5.0 to 9.2), which distributions do not package. Counters are added
// in generated code, so that counting costs little.

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
typedef struct {
    const char *target_name;
} qemu_info_t; // The fields after the name are not used.
enum { INLINE_ADD_U64 = 0 };

void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t, void (*)(qemu_plugin_id_t, struct qemu_plugin_tb *));
void qemu_plugin_register_atexit_cb(qemu_plugin_id_t, void (*)(qemu_plugin_id_t, void *), void *);
void qemu_plugin_register_vcpu_insn_exec_inline(struct qemu_plugin_insn *, int, void *, uint64_t);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *, size_t);
const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *);
size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *);
void qemu_plugin_outs(const char *);

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

static uint64_t all, vector;
static bool arm;

// 64-bit Arm: bits 25 to 28 are x111 for floating point and vectors. Moves between registers of different kinds count,
// because x86-64 needs an operation for them, too. ORR of a register with itself is a move.
static bool is_arm_operation(const uint8_t *bytes) {
    uint32_t word;
    memcpy(&word, bytes, 4);
    bool moves = (word & 0xffe0fc00) == 0x4ea01c00 && (word >> 5 & 31) == (word >> 16 & 31);
    bool zeros = (word & 0x9ff80400) == 0x0f000400; // MOVI and MVNI: constants.
    return (word >> 25 & 7) == 7 && !moves && !zeros;
}

// x86-64: the VEX and EVEX encodings, less moves, broadcasts of memory and general instructions (BMI).
static bool is_x86_operation(const uint8_t *bytes, size_t size) {
    size_t at = 0;
    int map, opcode;
    if (bytes[at] == 0xc5 && size > 3) {
        map = 1, opcode = bytes[at + 2], at += 3;
    } else if (bytes[at] == 0xc4 && size > 4) {
        map = bytes[at + 1] & 31, opcode = bytes[at + 3], at += 4;
    } else if (bytes[at] == 0x62 && size > 5) {
        map = bytes[at + 1] & 7, opcode = bytes[at + 4], at += 5;
    } else {
        return false;
    }
    bool memory = bytes[at] >> 6 != 3;
    switch (map) {
    case 1:
        switch (opcode) {
        case 0x10: case 0x11: case 0x28: case 0x29: case 0x2b: case 0x6f: case 0x7f: case 0xe7: case 0xf0: // Moves.
        case 0x77: // VZEROUPPER.
            return false;
        case 0x6e: case 0x7e: case 0xd6: // Moves of words.
            return !memory;
        }
        return true;
    case 2:
        switch (opcode) {
        case 0x18: case 0x19: case 0x1a: case 0x58: case 0x59: case 0x5a: case 0x78: case 0x79: // Broadcasts.
            return !memory;
        case 0xf2: case 0xf3: case 0xf5: case 0xf6: case 0xf7: // BMI.
            return false;
        }
        return true;
    default:
        return opcode != 0xf0; // RORX.
    }
}

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *block) {
    (void)id;
    for (size_t i = 0; i < qemu_plugin_tb_n_insns(block); i++) {
        struct qemu_plugin_insn *instruction = qemu_plugin_tb_get_insn(block, i);
        const uint8_t *bytes = qemu_plugin_insn_data(instruction);
        size_t size = qemu_plugin_insn_size(instruction);
        qemu_plugin_register_vcpu_insn_exec_inline(instruction, INLINE_ADD_U64, &all, 1);
        if (arm ? is_arm_operation(bytes) : is_x86_operation(bytes, size))
            qemu_plugin_register_vcpu_insn_exec_inline(instruction, INLINE_ADD_U64, &vector, 1);
    }
}

static void finished(qemu_plugin_id_t id, void *data) {
    (void)id, (void)data;
    char line[80];
    snprintf(line, sizeof line, "counted %llu %llu\n", (unsigned long long)all, (unsigned long long)vector);
    qemu_plugin_outs(line);
}

__attribute__((visibility("default"))) int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int count,
                                                               char **arguments) {
    (void)count, (void)arguments;
    arm = strcmp(info->target_name, "aarch64") == 0;
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_atexit_cb(id, finished, NULL);
    return 0;
}
