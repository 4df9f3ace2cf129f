"""Options of the TPU compiler that every program is compiled with."""

# The tables of prefetches, 512 bytes each, lie at multiples of this: of 16 KiB by default, which makes 90 MiB of the 80
# unrolled layers of Chinchilla. The code that comes out is the same.
LIBTPU_FLAGS = {'xla_jf_program_hbm_alignment_in_kib': 1}
