#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| moepack_fuzz::ternary_round_trip::run(data));
