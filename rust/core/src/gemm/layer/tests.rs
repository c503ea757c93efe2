use std::ops::Range;
use std::sync::Arc;

use rayon::ThreadPool;

use super::bands::Bands;
use super::cut::{Cut, multiple};
use super::*;
use crate::Result;
use crate::formats::groupwise::View;
use crate::formats::groupwise::tests::{case, spec};
use crate::gemm::groupwise::Groupwise;
use crate::gemm::groupwise::tests::INTEGERS;
#[cfg(target_arch = "x86_64")]
use crate::gemm::groupwise::tests::emulated;
use crate::gemm::matmul;
use crate::pool;
use crate::simd::Isa;
#[cfg(target_arch = "x86_64")]
use crate::simd::Kind;
use crate::types::{Activations, Mode, Shape};

fn sets() -> impl Iterator<Item = Isa> {
    Isa::all_available()
}

fn activations(count: usize) -> Vec<f32> {
    (0..count)
        .map(|i| ((i * 7919 % 1009) as f32 / 504.0 - 1.0) * if i % 97 == 5 { 0.55 } else { 0.035 })
        .collect()
}

/// Gate, up and down.
type Views<'a> = [View<'a>; 3];

fn forward(
    views: Views,
    x: &[f32],
    routing: Routing,
    mode: Mode,
    isa: Isa,
    pool: &ThreadPool,
) -> Result<Vec<f32>> {
    let [gate, up, down] = views.map(|view| Groupwise::new(view, mode, isa).unwrap());
    let mut y = vec![f32::NAN; x.len()];
    let layer = Layer::new(&gate, &up, &down);
    layer.forward(x, routing, &mut y, isa, pool)?;
    Ok(y)
}

/// The layer computed from grouped products of one token each.
fn layer_by_hand([gate, up, down]: Views, x: &[f32], routing: &Routing, mode: Mode, isa: Isa) -> Vec<f32> {
    let shape = gate.layout().shape();
    let pool = pool::current().unwrap();
    let single = |view: &View, expert: usize, x: &[f32]| {
        let mut y = vec![0.0; view.layout().shape().rows];
        matmul(
            &Groupwise::new(*view, mode, isa).unwrap(),
            expert,
            x,
            1,
            &mut y,
            &pool,
        )
        .unwrap();
        y
    };
    let mut y = vec![0.0; x.len()];
    for (pair, &expert) in routing.experts.iter().enumerate() {
        let Some(expert) = usize::try_from(expert).ok().filter(|&e| e < shape.experts) else {
            continue;
        };
        let token = pair / routing.top_k;
        let x = &x[token * shape.columns..][..shape.columns];
        let mut hidden = single(&gate, expert, x);
        gated(Isa::SCALAR, &mut hidden, &single(&up, expert, x));
        let output = single(&down, expert, &hidden);
        let y = &mut y[token * shape.columns..][..shape.columns];
        y.iter_mut()
            .zip(output)
            .for_each(|(y, value)| *y += routing.weights[pair] * value);
    }
    y
}

/// Tensors of 5 experts of 40 x 70: gate, an up with the same groups, one with others, and down.
fn blobs() -> [Vec<u8>; 4] {
    [
        case(5, 40, 70, spec(4, 32, false)).blob,
        case(5, 40, 70, spec(3, 32, true)).blob,
        case(5, 40, 70, spec(2, 64, false)).blob,
        case(5, 70, 40, spec(8, 0, true)).blob,
    ]
}

/// Experts and weights of `tokens` tokens, three each, with some invalid experts.
fn choice(tokens: usize) -> (Vec<i64>, Vec<f32>) {
    let experts = (0..tokens * 3).map(|i| [0, 4, 2, 5, -1, 1, 3][i * i % 7]);
    let weights = (0..tokens * 3).map(|i| (i % 5) as f32 * 0.25 - 0.5);
    (experts.collect(), weights.collect())
}

#[test]
fn a_layer_is_its_projections() {
    let pool = pool::current().unwrap();
    let blobs = blobs();
    let [gate, same, other, down] = [0, 1, 2, 3].map(|i| View::parse(&blobs[i]).unwrap());
    for up in [same, other] {
        let views = [gate, up, down];
        for tokens in [0, 1, 3, 40] {
            let x = activations(tokens * 70);
            let (experts, weights) = choice(tokens);
            let routing = Routing {
                experts: &experts,
                weights: &weights,
                top_k: 3,
            };
            for (mode, isa) in INTEGERS
                .into_iter()
                .flat_map(|mode| sets().map(move |isa| (mode, isa)))
            {
                let expected = layer_by_hand(views, &x, &routing, mode, isa);
                assert_eq!(forward(views, &x, routing, mode, isa, &pool).unwrap(), expected);
                #[cfg(target_arch = "x86_64")]
                if isa.kind() == Kind::Avx512 {
                    let [gate, up, down] = views.map(|view| emulated(&view, mode, isa));
                    let layer = Layer::new(&gate, &up, &down);
                    let mut y = vec![f32::NAN; x.len()];
                    layer.forward(&x[..], routing, &mut y, isa, &pool).unwrap();
                    assert_eq!(y, expected);
                }
            }
        }
    }
}

/// Experts with many tokens use panels, with shared and separate activations; the others are exact.
#[test]
fn a_layer_in_bf16_is_near_its_projections() {
    let pool = pool::current().unwrap();
    let blobs = blobs();
    let [gate, same, other, down] = [0, 1, 2, 3].map(|i| View::parse(&blobs[i]).unwrap());
    let x = activations(60 * 70);
    let (mut experts, weights) = choice(60);
    experts[..20].fill(1);
    let routing = Routing {
        experts: &experts,
        weights: &weights,
        top_k: 3,
    };
    for up in [same, other] {
        let views = [gate, up, down];
        let exact = layer_by_hand(views, &x, &routing, Mode::Exact, Isa::SCALAR);
        let size = exact.iter().map(|y| y * y).sum::<f32>();
        let hold = |y: &[f32], what: &str| {
            let off: f32 = y.iter().zip(&exact).map(|(a, b)| (a - b) * (a - b)).sum();
            assert!(off <= size * 1e-4, "{what}: {off} of {size}");
        };
        for isa in sets() {
            hold(
                &forward(views, &x, routing, Mode::Bf16, isa, &pool).unwrap(),
                isa.name(),
            );
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(isa) = Isa::new(Kind::Avx512) {
            let [gate, up, down] = views.map(|view| emulated(&view, Mode::Bf16, isa));
            let layer = Layer::new(&gate, &up, &down);
            let mut y = vec![f32::NAN; x.len()];
            layer.forward(&x[..], routing, &mut y, isa, &pool).unwrap();
            hold(&y, "emulated");
        }
    }
}

/// With biases and a clamped gate, the layer equals its products, computed one token of one expert at a time.
#[test]
fn biases_are_added_to_products() {
    let (blobs, pool) = (blobs(), pool::current().unwrap());
    let views = [0, 2, 3].map(|i| View::parse(&blobs[i]).unwrap());
    let shape = views[0].layout().shape();
    let numbers =
        |count: usize| -> Vec<f32> { (0..count).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect() };
    let gate_up = numbers(2 * shape.experts * shape.rows);
    let down_bias = numbers(shape.experts * shape.columns);
    let act = Gate::Clamped {
        alpha: 1.7,
        limit: 0.8,
    };
    let (x, isa) = (activations(7 * shape.columns), crate::simd::active().unwrap());
    let (experts, weights) = choice(7);
    let routing = Routing {
        experts: &experts,
        weights: &weights,
        top_k: 3,
    };
    let [gate, up, down] = views.map(|view| Groupwise::new(view, Mode::Exact, isa).unwrap());
    let biases = Biases {
        gate_up: Activations::F32(&gate_up),
        down: Activations::F32(&down_bias),
    };
    let layer = Layer {
        act,
        biases: Some(biases),
        ..Layer::new(&gate, &up, &down)
    };
    let mut found = vec![f32::NAN; x.len()];
    layer.forward(&x[..], routing, &mut found, isa, &pool).unwrap();
    let product = |matrix: &dyn Projection, expert: usize, x: &[f32]| {
        let mut y = vec![0.0; matrix.shape().rows];
        matmul(matrix, expert, x, 1, &mut y, &pool).unwrap();
        y
    };
    for (token, found) in found.chunks_exact(shape.columns).enumerate() {
        let x = &x[token * shape.columns..][..shape.columns];
        let mut expected = vec![0.0; shape.columns];
        for pair in token * 3..token * 3 + 3 {
            let Some(expert) = usize::try_from(experts[pair]).ok().filter(|&e| e < shape.experts) else {
                continue;
            };
            let (mut hidden, mut factors) = (product(&gate, expert, x), product(&up, expert, x));
            for row in 0..shape.rows {
                let first = 2 * (expert * shape.rows + row);
                hidden[row] += gate_up[first];
                factors[row] += gate_up[first + 1];
            }
            act.apply(isa, &mut hidden, &factors);
            for (row, value) in product(&down, expert, &hidden).into_iter().enumerate() {
                expected[row] += weights[pair] * (value + down_bias[expert * shape.columns + row]);
            }
        }
        assert_eq!(found, expected);
    }
    let short = Biases {
        down: Activations::F32(&down_bias[1..]),
        ..biases
    };
    let layer = Layer {
        biases: Some(short),
        ..layer
    };
    let mut y = vec![0.0; x.len()];
    assert!(layer.forward(&x[..], routing, &mut y, isa, &pool).is_err());
}

#[test]
fn a_layer_does_not_depend_on_the_number_of_threads() {
    let blobs = blobs();
    let views = [0, 2, 3].map(|i| View::parse(&blobs[i]).unwrap());
    let x = activations(60 * 70);
    let (experts, weights) = choice(60);
    let routing = Routing {
        experts: &experts,
        weights: &weights,
        top_k: 3,
    };
    let isa = crate::simd::active().unwrap();
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        forward(views, &x, routing, Mode::Int8, isa, &pool).unwrap()
    };
    assert_eq!(run(1), run(2));
    assert_eq!(run(1), run(5));
}

#[test]
fn many_tokens_are_summed_in_bands_to_the_same_bits() {
    let blobs = [(32, 1024, 4), (32, 1024, 3), (1024, 32, 4)]
        .map(|(rows, columns, bits)| case(5, rows, columns, spec(bits, 32, true)).blob);
    let views = [0, 1, 2].map(|i| View::parse(&blobs[i]).unwrap());
    let (tokens, columns) = (600, 1024);
    let x = activations(tokens * columns);
    let (experts, weights) = choice(tokens);
    let run = |tokens: Range<usize>, threads| {
        let pairs = tokens.start * 3..tokens.end * 3;
        let routing = Routing {
            experts: &experts[pairs.clone()],
            weights: &weights[pairs],
            top_k: 3,
        };
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        let x = &x[tokens.start * columns..tokens.end * columns];
        let isa = crate::simd::active().unwrap();
        forward(views, x, routing, Mode::Int8, isa, &pool).unwrap()
    };
    let valid = |&&expert: &&i64| (0..5).contains(&expert);
    let job = Job::of_offsets(&[0, experts.iter().filter(valid).count()]);
    let down = Groupwise::new(views[2], Mode::Int8, Isa::SCALAR).unwrap();
    assert!(
        [1, 2]
            .iter()
            .all(|&threads| Bands::new(&down, &job, threads).is_some())
    );
    let few: Vec<f32> = (0..tokens)
        .step_by(100)
        .flat_map(|token| run(token..token + 100, 1))
        .collect();
    assert!(run(0..tokens, 1) == few && run(0..tokens, 2) == few);
}

#[test]
fn a_layer_that_does_not_fit_is_refused() {
    let pool = pool::current().unwrap();
    let (wide, tall) = (
        case(2, 32, 64, spec(4, 32, false)).blob,
        case(2, 64, 32, spec(4, 32, false)).blob,
    );
    let [wide, tall] = [&wide, &tall].map(|blob| View::parse(blob).unwrap());
    let attempt = |gate, up, down, tokens: usize, pairs: usize, top_k| {
        let x = vec![0.0f32; tokens * 64];
        let (experts, weights) = (vec![0; pairs], vec![1.0; pairs]);
        let routing = Routing {
            experts: &experts,
            weights: &weights,
            top_k,
        };
        forward([gate, up, down], &x, routing, Mode::Exact, Isa::SCALAR, &pool)
    };
    assert!(attempt(wide, wide, tall, 3, 6, 2).is_ok());
    assert!(attempt(wide, wide, wide, 3, 6, 2).is_err());
    assert!(attempt(wide, tall, tall, 3, 6, 2).is_err());
    assert!(attempt(wide, wide, tall, 3, 7, 2).is_err());
    assert!(attempt(wide, wide, tall, 2, 6, 2).is_err());
    assert!(attempt(wide, wide, tall, 3, 6, 0).is_err());
}

#[test]
fn a_layer_without_rows_or_columns_is_zero() {
    let pool = pool::current().unwrap();
    for (rows, columns) in [(0, 6), (6, 0)] {
        let gate = case(2, rows, columns, spec(4, 32, false)).blob;
        let down = case(2, columns, rows, spec(4, 32, false)).blob;
        let [gate, down] = [&gate, &down].map(|blob| View::parse(blob).unwrap());
        let routing = Routing {
            experts: &[1],
            weights: &[1.0],
            top_k: 1,
        };
        let x = vec![1.0; columns];
        let y = forward([gate, gate, down], &x, routing, Mode::Exact, Isa::SCALAR, &pool).unwrap();
        assert!(y.iter().all(|&y| y == 0.0));
    }
}

/// A projection of `rows` rows that is only divided.
struct Divided {
    rows: usize,
    granule: usize,
    wide: usize,
}

impl Projection for Divided {
    fn shape(&self) -> Shape {
        Shape {
            experts: 5,
            rows: self.rows,
            columns: 64,
            ndim: 3,
        }
    }

    fn row_bytes(&self) -> usize {
        32
    }

    fn granule(&self) -> usize {
        self.granule
    }

    fn wide(&self) -> usize {
        self.wide
    }

    fn products<'s>(&'s self, _: &Arc<Job>) -> Box<dyn Products + 's> {
        unreachable!("nothing is multiplied")
    }
}

#[test]
fn units_of_few_rows_are_wide_and_even() {
    // One token, three experts of 12 granules: the heights of units in granules.
    let heights = |threads| {
        let projection = Divided {
            rows: 768,
            granule: 64,
            wide: 320,
        };
        let job = Job::of_offsets(&[0, 1, 1, 2, 3, 3]);
        let cut = Cut::new(&[&projection], &job, threads);
        let heights: Vec<_> = (0..cut.units(&job))
            .map(|unit| cut.at(unit).1.len() / 64)
            .collect();
        heights
    };
    assert_eq!(heights(2), [6; 6]);
    assert_eq!(heights(6), [6; 6]);
    // There are too few rows for wide units.
    assert_eq!(heights(9), [4; 9]);
    assert_eq!(heights(64), [1; 36]);
}

#[test]
fn cuts_cover_all_rows_once() {
    let blobs = blobs();
    let [gate, down] = [0, 3].map(|i| View::parse(&blobs[i]).unwrap());
    let groupwise = |view| Groupwise::new(view, Mode::Exact, Isa::SCALAR).unwrap();
    let divided = |rows, granule, wide| Divided { rows, granule, wide };
    let (gate, down) = (groupwise(gate), groupwise(down));
    let (uneven, none) = (divided(1000, 16, 80), divided(0, 16, 80));
    let cases: [(&dyn Projection, usize); 6] = [
        (&gate, 1),
        (&down, 2),
        (&down, 64),
        (&uneven, 3),
        (&uneven, 50),
        (&none, 2),
    ];
    for (projection, threads) in cases {
        let job = Job::of_offsets(&[0, 2, 2, 3, 3, 9]);
        let cut = Cut::new(&[projection], &job, threads);
        let mut seen = vec![0; job.tasks.len() * projection.shape().rows];
        for unit in 0..cut.units(&job) {
            let (task, rows) = cut.at(unit);
            assert_eq!(rows.start % projection.granule(), 0);
            rows.for_each(|row| seen[task * projection.shape().rows + row] += 1);
        }
        assert!(seen.iter().all(|&count| count == 1));
    }
    assert_eq!([multiple(16, 64), multiple(6, 4), multiple(1, 16)], [64, 12, 16]);
}
