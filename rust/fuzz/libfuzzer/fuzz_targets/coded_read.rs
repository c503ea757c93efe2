#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| moepack_fuzz::coded_read::run(data));
