/* A plugin of QEMU's user mode: the instructions that a program executes, and those of them that multiply and add.
 *
 * Prototypes of plugin API 1 (QEMU 6 to 8), from include/qemu/qemu-plugin.h: Debian ships no header. */
#include <stdint.h>
#include <stdio.h>
#include <stddef.h>

typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
enum { ADD_U64 = 0 };

void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t, void (*)(qemu_plugin_id_t, struct qemu_plugin_tb *));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *, int, void *, uint64_t);
void qemu_plugin_register_atexit_cb(qemu_plugin_id_t, void (*)(qemu_plugin_id_t, void *), void *);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *, size_t);
const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *);
void qemu_plugin_outs(const char *);

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

static uint64_t executed, multiplied;

/* (mask, bits) of A64's vector multiply-adds; Arm ARM, C4.1. */
static const uint32_t multiply_adds[][2] = {
    {0xbfa0fc00, 0x0e20cc00}, {0xbf80f400, 0x0f801000}, /* FMLA of float32 and float64: by vector, by element */
    {0xbfe0fc00, 0x0e400c00}, {0xbfc0f400, 0x0f001000}, /* FMLA of float16 */
    {0xffe0fc00, 0x6e40ec00}, {0xbfe0fc00, 0x2e40fc00}, {0xbfc0f400, 0x0f40f000}, /* BFMMLA, BFDOT */
    {0xffe0fc00, 0x4e80a400}, {0xbfe0fc00, 0x0e809400}, {0xbfc0f400, 0x0f80e000}, /* SMMLA, SDOT */
    {0xffa0e000, 0x65a00000}, /* SVE's FMLA of float32 and float64 */
};

static int multiplies_and_adds(uint32_t word)
{
    for (size_t i = 0; i < sizeof multiply_adds / sizeof *multiply_adds; i++)
        if ((word & multiply_adds[i][0]) == multiply_adds[i][1])
            return 1;
    return 0;
}

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *block)
{
    size_t length = qemu_plugin_tb_n_insns(block);
    uint64_t found = 0;
    for (size_t i = 0; i < length; i++)
        found += multiplies_and_adds(*(const uint32_t *)qemu_plugin_insn_data(qemu_plugin_tb_get_insn(block, i)));
    qemu_plugin_register_vcpu_tb_exec_inline(block, ADD_U64, &executed, length);
    if (found)
        qemu_plugin_register_vcpu_tb_exec_inline(block, ADD_U64, &multiplied, found);
}

static void ended(qemu_plugin_id_t id, void *unused)
{
    char text[80];
    snprintf(text, sizeof text, "counted %llu %llu\n", (unsigned long long)executed, (unsigned long long)multiplied);
    qemu_plugin_outs(text);
}

__attribute__((visibility("default")))
int qemu_plugin_install(qemu_plugin_id_t id, const void *info, int argc, char **argv)
{
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_atexit_cb(id, ended, NULL);
    return 0;
}
