//! Programs for the makers of moepack, and what they share. No wheel contains them.
//!
//! `fsv8_dictionaries` searches the dictionaries that the core embeds; `codec_figures` measures the ternary codes.

pub mod fsv8;
