/* The tile instructions of AMX where they fault: a handler of SIGILL decodes each, does it on memory of the thread, and
   goes on behind it. So the machine code of kernels runs on a CPU without tiles, and in a process that holds no
   permission for them; a product takes some microseconds.

   Known: ldtilecfg, sttilecfg, tilerelease, tilezero, tileloadd(t1), tilestored, tdpbf16ps, tdpfp16ps, tdpb{ss,su,us,uu}d.
   As a CPU does, it refuses (the signal's default, so the process ends) a tile that is not configured, and shapes that do not
   fit together.

   Where the CPU has tiles and the process no permission, only the instructions on their data fault. The shapes then are
   those of the thread's saved state, and configuring or releasing tiles leaves what they hold. */
#define _GNU_SOURCE
#include <cpuid.h>
#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/ucontext.h>

enum { kShapes = 17, kMagic = 0x46505853 }; /* a state component of XSAVE; the mark of an extended signal frame */

static _Thread_local uint8_t config[64];
static _Thread_local uint8_t tile[8][16][64];
static long emulated;
static struct sigaction before;

long tiles_emulated(void) { return emulated; }
static int rows(int t) { return config[48 + t]; }
static int bytes(int t) { return config[16 + 2 * t] | config[17 + 2 * t] << 8; }

static void read_shapes(const ucontext_t *context) {
  const uint8_t *frame = (const uint8_t *)context->uc_mcontext.fpregs;
  uint32_t magic, size, offset, c, d;
  uint64_t components, present;
  memcpy(&magic, frame + 464, 4), memcpy(&components, frame + 472, 8), memcpy(&present, frame + 512, 8);
  if (magic != kMagic || !(components >> kShapes & 1)) return;
  __cpuid_count(0xD, kShapes, size, offset, c, d);
  if (present >> kShapes & 1) memcpy(config, frame + offset, sizeof config);
  else memset(config, 0, sizeof config);
}

static float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

static float wide(const uint8_t *p, int is_float16) {
  if (is_float16) { /* denormals are numbers */
    _Float16 half;
    memcpy(&half, p, 2);
    return (float)half;
  }
  const uint32_t word = (uint32_t)(p[0] | p[1] << 8) << 16;
  float x;
  memcpy(&x, &word, 4);
  return flushed(x);
}

/* C[m, n] += two chains of fused multiply-adds, over even and over odd terms. */
static void add_floats(int c, int a, int b, int is_float16) {
  float left[32], right[16][32];
  for (int n = 0; n < bytes(c) / 4; n++)
    for (int k = 0; k < 2 * rows(b); k++) right[n][k] = wide(&tile[b][k / 2][4 * n + 2 * (k % 2)], is_float16);
  for (int m = 0; m < rows(c); m++) {
    for (int k = 0; k < 2 * rows(b); k++) left[k] = wide(&tile[a][m][2 * k], is_float16);
    for (int n = 0; n < bytes(c) / 4; n++) {
      float sum[2] = {0, 0}, total;
      for (int k = 0; k < 2 * rows(b); k++) sum[k % 2] = flushed(fmaf(left[k], right[n][k], sum[k % 2]));
      memcpy(&total, &tile[c][m][4 * n], 4);
      total = flushed(flushed(total) + flushed(sum[0] + sum[1]));
      memcpy(&tile[c][m][4 * n], &total, 4);
    }
  }
}

static void add_bytes(int c, int a, int b, int signed_a, int signed_b) {
  for (int m = 0; m < rows(c); m++)
    for (int n = 0; n < bytes(c) / 4; n++) {
      uint32_t total;
      memcpy(&total, &tile[c][m][4 * n], 4);
      for (int k = 0; k < 4 * rows(b); k++) {
        const uint8_t x = tile[a][m][k], y = tile[b][k / 4][4 * n + k % 4];
        total += (uint32_t)((signed_a ? (int8_t)x : x) * (signed_b ? (int8_t)y : y));
      }
      memcpy(&tile[c][m][4 * n], &total, 4);
    }
}

static int product(int opcode, int prefix, int c, int a, int b) {
  if (!rows(a) || !rows(b) || !rows(c) || c == a || c == b || a == b) return 0;
  if (rows(c) != rows(a) || bytes(c) != bytes(b) || bytes(a) != 4 * rows(b) || bytes(c) % 4) return 0;
  if (opcode == 0x5C) add_floats(c, a, b, prefix == 3); /* F3: bfloat16; F2: float16 */
  else add_bytes(c, a, b, prefix >= 2, prefix % 2); /* none: both unsigned; 66: A; F3: B; F2: both signed */
  memset(tile[c][rows(c)], 0, 64 * (16 - rows(c)));
  return 1;
}

static int configure(const uint8_t *from) {
  memcpy(config, from, 64);
  memset(tile, 0, sizeof tile);
  if (config[0] > 1) return 0;
  for (int t = 0; t < 8; t++)
    if (rows(t) > 16 || bytes(t) > 64 || !rows(t) != !bytes(t)) return 0;
  if (!config[0]) memset(config, 0, 64);
  return 1;
}

/* One instruction; what follows it, or 0 where it is not known or its operands are wrong. */
static const uint8_t *execute(ucontext_t *context) {
  static const int numbers[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  const greg_t *g = context->uc_mcontext.gregs;
  const uint8_t *p = (const uint8_t *)g[REG_RIP];
  if (p[0] != 0xC4 || (p[1] & 31) != 2 || p[2] & 0x84) return 0; /* VEX, 0F38, W0, L0 */
  const int x_bit = !(p[1] & 0x40) << 3, b_bit = !(p[1] & 0x20) << 3;
  const int prefix = p[2] & 3, vvvv = ~(p[2] >> 3) & 15, opcode = p[3], mod = p[4] >> 6, r = p[4] >> 3 & 7, rm = p[4] & 7;
  uint8_t *address = 0;
  greg_t index = 0; /* of loads and stores the pitch */
  p += 5;
  if (mod != 3) {
    int base = rm;
    if (rm == 4) { /* SIB */
      const int i = (*p >> 3 & 7) | x_bit;
      if (i != 4) index = g[numbers[i]] * (1 << (*p >> 6));
      base = *p++ & 7;
    }
    int32_t shift = 0;
    if (base == 5 && mod == 0) { /* no base; without SIB, relative to the next instruction */
      memcpy(&shift, p, 4), p += 4;
      address = (uint8_t *)(intptr_t)shift + (rm == 4 ? 0 : (intptr_t)p);
    } else {
      if (mod == 1) shift = (int8_t)*p++;
      if (mod == 2) memcpy(&shift, p, 4), p += 4;
      address = (uint8_t *)g[numbers[base | b_bit]] + shift;
    }
  }
  if (opcode == 0x49 && mod != 3 && prefix == 0) return configure(address + index) ? p : 0;
  if (opcode == 0x49 && mod != 3 && prefix == 1) return memcpy(address + index, config, 64), p;
  if (opcode == 0x49 && mod == 3 && prefix == 0 && r == 0 && rm == 0)
    return memset(config, 0, 64), memset(tile, 0, sizeof tile), p;
  if (!rows(r)) return 0;
  if (opcode == 0x49 && mod == 3 && prefix == 3) return memset(tile[r], 0, 1024), p;
  if (opcode == 0x4B && mod != 3 && rm == 4 && prefix) {
    if (prefix != 2) memset(tile[r], 0, 1024);
    for (int row = 0; row < rows(r); row++) {
      if (prefix == 2) memcpy(address + row * index, tile[r][row], bytes(r));
      else memcpy(tile[r][row], address + row * index, bytes(r));
    }
    return p;
  }
  if (mod == 3 && ((opcode == 0x5C && prefix >= 2) || opcode == 0x5E))
    return product(opcode, prefix, r, rm, vvvv) ? p : 0;
  return 0;
}

static void handler(int number, siginfo_t *info, void *context) {
  (void)info;
  read_shapes(context);
  const uint8_t *next = execute(context);
  if (next == 0) { /* it faults again, and whoever was there before takes it */
    sigaction(number, &before, 0);
    return;
  }
  __atomic_fetch_add(&emulated, 1, __ATOMIC_RELAXED);
  ((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP] = (greg_t)next;
}

int emulate_tiles(void) {
  struct sigaction mine;
  memset(&mine, 0, sizeof mine);
  mine.sa_sigaction = handler;
  mine.sa_flags = SA_SIGINFO | SA_NODEFER;
  return sigaction(SIGILL, &mine, &before);
}
