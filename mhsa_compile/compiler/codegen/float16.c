/* float16 in software where the CPU passes floats in registers of their own but has no conversions: RV64GC.

   LLVM calls these two with the half in a float register. TVM puts functions of the same names into its objects, which
   take it in an integer register; they are weak, so that these win when they are linked. */
#include <stdint.h>
#include <string.h>

float __extendhfsf2(_Float16 half) {
  uint16_t bits;
  memcpy(&bits, &half, sizeof bits);
  const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 0x1f, fraction = bits & 0x3ff;
  uint32_t wide = exponent << 23 | fraction << 13;
  float value = fraction * 0x1p-24f; /* a denormal's */
  if (exponent != 0) {
    wide += exponent == 31 ? 0x7f800000u - (31u << 23) : 112u << 23;
    memcpy(&value, &wide, sizeof value);
  }
  memcpy(&wide, &value, sizeof wide);
  wide |= sign;
  memcpy(&value, &wide, sizeof value);
  return value;
}

_Float16 __truncsfhf2(float value) {
  uint32_t wide;
  memcpy(&wide, &value, sizeof wide);
  const uint16_t sign = wide >> 16 & 0x8000;
  wide &= 0x7fffffff;
  uint16_t bits;
  if (wide > 0x7f800000) { /* NaN, made quiet */
    bits = 0x7e00 | (wide >> 13 & 0x1ff);
  } else if (wide >= 0x477ff000) { /* rounds to beyond the largest number */
    bits = 0x7c00;
  } else if (wide >= 0x38800000) { /* to nearest, ties to even */
    bits = (wide - (112u << 23) + 0xfff + (wide >> 13 & 1)) >> 13;
  } else { /* a denormal: the last place of 0.5 is its unit */
    float magnitude;
    memcpy(&magnitude, &wide, sizeof magnitude);
    magnitude += 0.5f;
    memcpy(&wide, &magnitude, sizeof wide);
    bits = wide - 0x3f000000;
  }
  bits |= sign;
  _Float16 half;
  memcpy(&half, &bits, sizeof half);
  return half;
}
