#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| moepack_fuzz::kernel_twins::run(data));
