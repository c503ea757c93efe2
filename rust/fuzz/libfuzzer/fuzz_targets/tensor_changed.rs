#![no_main]
// Panics are expected here, and the fuzzer's own hook would end the process.
libfuzzer_sys::fuzz_target!(init: std::panic::set_hook(Box::new(|_| ())), |data: &[u8]| moepack_fuzz::tensor_changed::run(data));
