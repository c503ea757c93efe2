mod naive;

use rayon::ThreadPool;

use self::naive::Naive;
use super::*;
use crate::formats::groupwise::{View, encode, tests::spec};
use crate::gemm::dense::{self, Dense, Kind};
use crate::gemm::groupwise::Groupwise;
use crate::pool;
use crate::simd::Isa;
use crate::types::Mode;
use crate::types::Shape;

const HIDDEN: usize = 24;
const WIDTH: usize = 6;
const HEADS: usize = 4;
const GROUPS: usize = 2;
const INNER: usize = 10;
const EXPERTS: usize = 5;
const CAPACITY: usize = 700;
const EPSILON: f32 = 1e-5;

/// The type of a cache.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Stored {
    F32,
    Bf16,
    Bytes,
}

/// The optional parts of a decoder under test.
#[derive(Clone, Copy)]
struct Settings {
    layers: usize,
    bias: bool,
    /// The lengths of the norms of queries and of keys.
    head_norms: Option<[usize; 2]>,
    router: bool,
    shared: bool,
    sinks: bool,
    gated: bool,
    window: Option<usize>,
    /// The number of rotated pairs of a head.
    rotated: usize,
    cache: Stored,
}

const PLAIN: Settings = Settings {
    layers: 2,
    bias: false,
    head_norms: None,
    router: true,
    shared: false,
    sinks: false,
    gated: false,
    window: None,
    rotated: WIDTH / 2,
    cache: Stored::F32,
};

/// Numbers derived from a name, for weights, caches and inputs.
fn numbers(name: &str, count: usize, size: f32) -> Vec<f32> {
    let seed = name
        .bytes()
        .fold(7usize, |seed, byte| (seed * 31 + byte as usize) % 65_521);
    let number = |i: usize| ((i * 7919 + seed * 611) % 2003) as f32 / 1001.0 - 1.0;
    (0..count).map(|i| size * number(i)).collect()
}

/// A packed stack of matrices: its values and its blob.
fn packed(name: String, experts: usize, rows: usize, columns: usize) -> (String, Vec<f32>, Vec<u8>) {
    let codes: Vec<u8> = numbers(&name, experts * rows * columns, 127.0)
        .iter()
        .map(|&n| (n + 128.0) as u8)
        .collect();
    let step = 1.0 / 256.0;
    let shape = Shape {
        experts,
        rows,
        columns,
        ndim: 3,
    };
    let (scales, pool) = (vec![step; experts * rows], pool::current().unwrap());
    let blob = encode(&codes, &scales, None, shape, spec(8, 0, true), &pool).unwrap();
    (
        name,
        codes
            .iter()
            .map(|&code| step * (f32::from(code) - 128.0))
            .collect(),
        blob,
    )
}

/// The tensors of a decoder by name, as values and as bytes.
struct Tensors {
    settings: Settings,
    named: Vec<(String, Vec<f32>, Vec<u8>)>,
    frequencies: Vec<f32>,
}

impl Tensors {
    fn new(settings: Settings) -> Tensors {
        let mut named = Vec::new();
        let mut add = |name: String, count: usize, size: f32, offset: f32| {
            let values: Vec<f32> = numbers(&name, count, size)
                .iter()
                .map(|value| value + offset)
                .collect();
            let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            named.push((name, values, bytes));
        };
        for layer in 0..settings.layers {
            let [few, many] = [GROUPS * WIDTH, HEADS * WIDTH];
            for (name, rows, columns) in [
                ("q", many, HIDDEN),
                ("gates", many, HIDDEN),
                ("sinks", HEADS, 1),
                ("k", few, HIDDEN),
                ("v", few, HIDDEN),
                ("o", HIDDEN, many),
                ("router", EXPERTS, HIDDEN),
                ("shared_gate", 1, HIDDEN),
                ("shared.gate", INNER, HIDDEN),
                ("shared.up", INNER, HIDDEN),
                ("shared.down", HIDDEN, INNER),
            ] {
                add(
                    format!("{layer}.{name}"),
                    rows * columns,
                    3.0 / (columns as f32).sqrt(),
                    0.0,
                );
                add(format!("{layer}.{name}.bias"), rows, 0.3, 0.0);
            }
            for (name, len) in [("in", HIDDEN), ("middle", HIDDEN)] {
                add(format!("{layer}.{name}.norm"), len, 0.3, 1.0);
            }
            for (name, index) in [("q", 0), ("k", 1)] {
                let len = settings.head_norms.map_or(1, |lengths| lengths[index]);
                add(format!("{layer}.{name}.norm"), len, 0.3, 1.0);
            }
        }
        add("norm".into(), HIDDEN, 0.3, 1.0);
        for layer in 0..settings.layers {
            for (name, rows, columns) in [
                ("gate", INNER, HIDDEN),
                ("up", INNER, HIDDEN),
                ("down", HIDDEN, INNER),
            ] {
                named.push(packed(
                    format!("{layer}.{name}"),
                    if settings.router { EXPERTS } else { 1 },
                    rows,
                    columns,
                ));
            }
        }
        let zipped = |named: &[(String, Vec<f32>, Vec<u8>)], layer: usize, end: &str, columns: usize| {
            let find = |name: String| &named.iter().find(|(found, ..)| *found == name).unwrap().1;
            let parts =
                ["q", "gates"].map(|part| find(format!("{layer}.{part}{end}")).chunks_exact(WIDTH * columns));
            let [queries, gates] = parts;
            let values: Vec<f32> = queries.zip(gates).flat_map(|(q, g)| [q, g].concat()).collect();
            let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            (format!("{layer}.zipped{end}"), values, bytes)
        };
        for layer in 0..settings.layers {
            for (end, columns) in [("", HIDDEN), (".bias", 1)] {
                named.push(zipped(&named, layer, end, columns));
            }
        }
        Tensors {
            settings,
            named,
            frequencies: (0..settings.rotated).map(|i| 0.5f32.powi(i as i32)).collect(),
        }
    }

    fn find(&self, name: &str) -> &(String, Vec<f32>, Vec<u8>) {
        self.named.iter().find(|(found, ..)| found == name).unwrap()
    }

    fn values(&self, name: &str) -> &[f32] {
        &self.find(name).1
    }

    fn dense(&self, name: &str, rows: usize, columns: usize, isa: Isa) -> Weights<'_> {
        let view = dense::View::new(&self.find(name).2, Kind::F32, rows, columns).unwrap();
        Box::new(Dense::new(view, Mode::Auto, isa).unwrap())
    }

    fn norm(&self, name: &str) -> Norm<'_> {
        Norm {
            weight: Activations::F32(self.values(name)),
            epsilon: EPSILON,
            offset: 0.0,
        }
    }

    fn linear(&self, name: &str, rows: usize, columns: usize, isa: Isa) -> Linear<'_> {
        let bias = self.settings.bias.then(|| self.values(&format!("{name}.bias")));
        Linear {
            weights: self.dense(name, rows, columns, isa),
            bias: bias.map(Activations::F32),
        }
    }

    fn block(&self, layer: usize, isa: Isa) -> Block<'_> {
        let settings = self.settings;
        let name = |name: &str| format!("{layer}.{name}");
        let [few, many] = [GROUPS * WIDTH, HEADS * WIDTH];
        let head_norm = |part| settings.head_norms.map(|_| self.norm(&name(part)));
        let all = |part: &str| -> Weights {
            let view = View::parse(&self.find(&name(part)).2).unwrap();
            Box::new(Groupwise::new(view, Mode::Exact, isa).unwrap())
        };
        let query = match settings.gated {
            true => self.linear(&name("zipped"), 2 * many, HIDDEN, isa),
            false => self.linear(&name("q"), many, HIDDEN, isa),
        };
        let sinks = settings.sinks.then(|| self.values(&name("sinks")));
        Block {
            norm: self.norm(&name("in.norm")),
            mixer: Mixer::Attention(Attention {
                query,
                key: self.linear(&name("k"), few, HIDDEN, isa),
                value: self.linear(&name("v"), few, HIDDEN, isa),
                output: self.linear(&name("o"), HIDDEN, many, isa),
                query_norm: head_norm("q.norm"),
                key_norm: head_norm("k.norm"),
                sinks: sinks.map(Activations::F32),
                gated: settings.gated,
                width: WIDTH,
                scale: 0.4,
            }),
            feed_forward: FeedForward {
                norm: self.norm(&name("middle.norm")),
                router: settings.router.then(|| Router {
                    weights: self.dense(&name("router"), EXPERTS, HIDDEN, isa),
                    bias: None,
                    sigmoid: false,
                    correction: None,
                    groups: None,
                    top_k: 2,
                    normalized: true,
                    scale: 1.0,
                }),
                experts: Experts {
                    gate: all("gate"),
                    up: all("up"),
                    down: all("down"),
                    act: Gate::Silu,
                    biases: None,
                },
                shared: settings.shared.then(|| Shared {
                    experts: Experts {
                        gate: self.dense(&name("shared.gate"), INNER, HIDDEN, isa),
                        up: self.dense(&name("shared.up"), INNER, HIDDEN, isa),
                        down: self.dense(&name("shared.down"), HIDDEN, INNER, isa),
                        act: Gate::Silu,
                        biases: None,
                    },
                    gate: Some(self.dense(&name("shared_gate"), 1, HIDDEN, isa)),
                }),
            },
        }
    }

    fn decoder(&self, isa: Isa) -> Decoder<'_> {
        Decoder {
            blocks: (0..self.settings.layers)
                .map(|layer| self.block(layer, isa))
                .collect(),
            rotary: Rotary {
                frequencies: &self.frequencies,
                scale: 1.25,
                order: Order::Halves,
            },
            norm: self.norm("norm"),
        }
    }
}

/// Buffers of keys and values, of each type.
struct Buffers {
    stored: Stored,
    window: Option<usize>,
    wide: Vec<Vec<f32>>,
    narrow: Vec<Vec<u16>>,
    bytes: Vec<Vec<i8>>,
}

impl Buffers {
    fn new(settings: &Settings) -> Buffers {
        let (count, size) = (2 * settings.layers, GROUPS * CAPACITY * WIDTH);
        Buffers {
            stored: settings.cache,
            window: settings.window,
            wide: vec![vec![f32::NAN; size]; count],
            narrow: vec![vec![0x7fc0; size]; count],
            bytes: vec![vec![-1; size / WIDTH * (WIDTH + 4)]; count],
        }
    }

    fn past(&mut self, length: usize) -> Vec<Past<'_>> {
        let mut wide = self.wide.iter_mut().map(|values| Lane::F32(values));
        let mut narrow = self.narrow.iter_mut().map(|values| Lane::Bf16(values));
        let mut bytes = self.bytes.iter_mut().map(|values| Lane::Bytes(values));
        let stored = self.stored;
        let mut next = || match stored {
            Stored::F32 => wide.next(),
            Stored::Bf16 => narrow.next(),
            Stored::Bytes => bytes.next(),
        };
        let mut past = Vec::new();
        while let (Some(keys), Some(values)) = (next(), next()) {
            let first = self
                .window
                .map_or(0, |window| (length + 1).saturating_sub(window));
            past.push(Past {
                keys,
                values,
                first,
                length,
            });
        }
        past
    }
}

fn token(number: usize) -> Vec<f32> {
    numbers(&format!("token {number}"), HIDDEN, 1.5)
}

/// The outputs of `count` tokens in sequence.
fn steps(tensors: &Tensors, count: usize, isa: Isa, pool: &ThreadPool) -> Vec<Vec<f32>> {
    let (decoder, mut buffers) = (tensors.decoder(isa), Buffers::new(&tensors.settings));
    let step = |number: usize| {
        let (x, mut y) = (token(number), vec![f32::NAN; HIDDEN]);
        let mut past = buffers.past(number);
        decoder
            .step(Activations::F32(&x), number, &mut past, &mut y, isa, pool)
            .unwrap();
        assert!(past.iter().all(|past| past.length == number + 1));
        y
    };
    (0..count).map(step).collect()
}

fn sets() -> impl Iterator<Item = Isa> {
    Isa::all_available()
}

/// Rounding errors of f32 are small relative to outputs of about 1: measured at most 2e-6.
fn assert_near(found: &[f32], expected: &[f64], bound: f64, what: &str) {
    for (found, expected) in found.iter().zip(expected) {
        let error = (f64::from(*found) - expected).abs();
        assert!(error <= bound, "{what}: {found} instead of {expected}");
    }
}

#[test]
fn steps_match_the_formulas() {
    let pool = pool::current().unwrap();
    for settings in [
        PLAIN,
        Settings {
            bias: true,
            head_norms: Some([WIDTH, WIDTH]),
            ..PLAIN
        },
        Settings {
            head_norms: Some([HEADS * WIDTH, GROUPS * WIDTH]),
            shared: true,
            ..PLAIN
        },
        Settings {
            router: false,
            layers: 3,
            ..PLAIN
        },
        Settings {
            sinks: true,
            window: Some(3),
            rotated: 2,
            bias: true,
            ..PLAIN
        },
        Settings {
            gated: true,
            head_norms: Some([WIDTH, WIDTH]),
            ..PLAIN
        },
    ] {
        let tensors = Tensors::new(settings);
        let mut naive = Naive {
            tensors: &tensors,
            caches: vec![Vec::new(); settings.layers],
        };
        let expected: Vec<Vec<f64>> = (0..9).map(|number| naive.step(&token(number), number)).collect();
        for isa in sets() {
            for (found, expected) in steps(&tensors, 9, isa, &pool).iter().zip(&expected) {
                assert_near(found, expected, 1e-5, isa.name());
            }
        }
    }
}

/// Several runs of tokens, and rounded caches: errors of 2^-9 of each key and value, or of 2^-8 of the largest of a
/// row, must not change the selected experts.
#[test]
fn many_tokens_are_visible() {
    let (pool, active) = (pool::current().unwrap(), crate::simd::active().unwrap());
    for (cache, bound) in [(Stored::F32, 2e-6), (Stored::Bf16, 2e-2), (Stored::Bytes, 2e-2)] {
        let tensors = Tensors::new(Settings {
            cache,
            layers: 1,
            router: cache == Stored::F32,
            ..PLAIN
        });
        let mut naive = Naive {
            tensors: &tensors,
            caches: vec![Vec::new(); 1],
        };
        let (mut off, mut size) = (0.0, 0.0);
        for (number, found) in steps(&tensors, 530, active, &pool).iter().enumerate() {
            for (&found, expected) in found.iter().zip(naive.step(&token(number), number)) {
                off += (f64::from(found) - expected).powi(2);
                size += expected * expected;
            }
        }
        assert!(
            off.sqrt() <= bound * size.sqrt(),
            "{} for {cache:?}",
            (off / size).sqrt()
        );
    }
}

#[test]
fn neither_threads_nor_sets_change_a_bit() {
    for cache in [Stored::Bf16, Stored::Bytes] {
        check_bits(&Tensors::new(Settings {
            shared: true,
            cache,
            ..PLAIN
        }));
    }
}

fn check_bits(tensors: &Tensors) {
    let pool = |threads| {
        rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap()
    };
    let expected = steps(tensors, 300, Isa::SCALAR, &pool(1));
    for isa in sets() {
        for threads in [1, 2, 5] {
            assert!(
                steps(tensors, 300, isa, &pool(threads)) == expected,
                "{}, {threads}",
                isa.name()
            );
        }
    }
}

fn attention<'d, 'a>(decoder: &'d mut Decoder<'a>, layer: usize) -> &'d mut Attention<'a> {
    match &mut decoder.blocks[layer].mixer {
        Mixer::Attention(attention) => attention,
        _ => unreachable!("the layers are attention"),
    }
}

#[test]
fn a_step_that_does_not_fit_is_refused() {
    let (tensors, pool) = (Tensors::new(PLAIN), pool::current().unwrap());
    let attempt = |change: fn(&mut Decoder), hidden: usize, length: usize, caches: usize| {
        let (mut decoder, mut buffers) = (tensors.decoder(Isa::SCALAR), Buffers::new(&PLAIN));
        change(&mut decoder);
        let (x, mut y) = (vec![1.0; hidden], vec![0.0; hidden]);
        let mut past = buffers.past(length);
        past.truncate(caches);
        decoder.step(Activations::F32(&x), 3, &mut past, &mut y, Isa::SCALAR, &pool)
    };
    assert!(attempt(|_| (), HIDDEN, 0, 2).is_ok());
    assert!(attempt(|_| (), HIDDEN + 1, 0, 2).is_err());
    assert!(attempt(|_| (), HIDDEN, 0, 1).is_err());
    assert!(attempt(|_| (), HIDDEN, CAPACITY, 2).is_err());
    let mut bytes = [vec![0; GROUPS * WIDTH * 8], vec![0; GROUPS * WIDTH * 8]];
    let [keys, values] = bytes.each_mut().map(|lane| Lane::Bytes(lane)); // rows without room for scales
    let past = Past {
        keys,
        values,
        first: 0,
        length: 0,
    };
    assert!(past.check(GROUPS, [WIDTH; 2]).is_err());
    assert!(attempt(|decoder| decoder.rotary.frequencies = &[1.0; 4], HIDDEN, 0, 2).is_err());
    assert!(attempt(|decoder| attention(decoder, 1).width = 5, HIDDEN, 0, 2).is_err());
    assert!(attempt(|decoder| attention(decoder, 0).width = 0, HIDDEN, 0, 2).is_err());
    assert!(attempt(|decoder| attention(decoder, 0).gated = true, HIDDEN, 0, 2).is_err());
    assert!(
        attempt(
            |decoder| attention(decoder, 0).sinks = Some(Activations::F32(&[1.0])),
            HIDDEN,
            0,
            2
        )
        .is_err()
    );
    assert!(
        attempt(
            |decoder| decoder.blocks[0].feed_forward.router = None,
            HIDDEN,
            0,
            2
        )
        .is_err()
    );
    assert!(attempt(|decoder| decoder.blocks.swap(0, 1), HIDDEN, 0, 2).is_ok());
    let many =
        |decoder: &mut Decoder| decoder.blocks[0].feed_forward.router.as_mut().unwrap().top_k = EXPERTS + 1;
    assert!(attempt(many, HIDDEN, 0, 2).is_err());
}
