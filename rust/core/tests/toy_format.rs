//! A format defined by this test and registered in one place supports everything that packed tensors do: size,
//! opening, checks, values, products and a layer of experts beside formats of the core.

use moepack_core::formats::groupwise::{self, ParameterType, Spec};
use moepack_core::gemm::dense::{Dense, Kind, View};
use moepack_core::gemm::layer::{Layer, Projection, Routing};
use moepack_core::gemm::matmul_grouped;
use moepack_core::simd::Isa;
use moepack_core::tensor::{self, Array, Compute, Details, Floats, Format, MAGIC_BYTES, Tensor};
use moepack_core::types::{Mode, Shape};
use moepack_core::{Error, Result, pool};
use rayon::ThreadPool;

const HEADER: usize = 64;

/// Rows of f32 after a header: the magic, experts, rows, columns and axes as u64, zeros.
struct Toy;

/// An open tensor of the format.
struct Rows(Shape);

fn corrupt<T>(what: &str) -> Result<T> {
    Err(Error::Corruption(format!("toy: {what}")))
}

impl Format for Toy {
    fn kind(&self) -> &'static str {
        "toy"
    }

    fn magic(&self) -> [u8; MAGIC_BYTES] {
        *b"TOYROWS1"
    }

    fn version(&self) -> u16 {
        1
    }

    fn bytes(&self, shape: Shape, _: &Details) -> Result<usize> {
        let size = shape
            .weights()
            .and_then(|count| count.checked_mul(4)?.checked_add(HEADER));
        size.ok_or_else(|| Error::InvalidArgument("toy: too large".into()))
    }

    fn open(&self, data: &[u8]) -> Result<Box<dyn Tensor>> {
        let Some((header, _)) = data.split_at_checked(HEADER) else {
            return Err(Error::InsufficientData("toy: no header".into()));
        };
        let [_, experts, rows, columns, ndim, ..] = header.as_chunks::<8>().0 else {
            unreachable!("a header has eight words")
        };
        let [experts, rows, columns, ndim] =
            [experts, rows, columns, ndim].map(|word| u64::from_le_bytes(*word) as usize);
        let shape = Shape {
            experts,
            rows,
            columns,
            ndim: ndim as u8,
        };
        match shape.has_valid_ndim() && self.bytes(shape, &Details::default()) == Ok(data.len()) {
            true => Ok(Box::new(Rows(shape))),
            false => corrupt("the size contradicts the shape"),
        }
    }
}

impl Rows {
    fn values(&self, data: &[u8]) -> Vec<f32> {
        let words = data[HEADER..].as_chunks::<4>().0;
        words.iter().map(|&word| f32::from_le_bytes(word)).collect()
    }
}

impl Tensor for Rows {
    fn format(&self) -> &'static dyn Format {
        &Toy
    }

    fn name(&self) -> String {
        "toy-f32".into()
    }

    fn shape(&self) -> Shape {
        self.0
    }

    fn bytes(&self) -> usize {
        HEADER + 4 * self.0.weights().unwrap_or(0)
    }

    fn details(&self) -> Details {
        Details::default()
    }

    fn modes(&self) -> &'static [Mode] {
        &[Mode::Auto, Mode::Exact]
    }

    fn verify(&self, data: &[u8], _: &ThreadPool) -> Result<()> {
        match self.values(data).iter().all(|value| value.is_finite()) {
            true => Ok(()),
            false => corrupt("a value is not finite"),
        }
    }

    fn decode(&self, _: &[u8], _: &mut [u8], _: &ThreadPool) -> Result<()> {
        Err(Error::InvalidArgument("toy: there are no codes".into()))
    }

    fn dequantize(&self, data: &[u8], out: Floats, _: &ThreadPool) -> Result<()> {
        match out {
            Floats::F32(out) => out.copy_from_slice(&self.values(data)),
            Floats::Bf16(out) => out
                .iter_mut()
                .zip(self.values(data))
                .for_each(|(bits, value)| *bits = half::bf16::from_f32(value).to_bits()),
        }
        Ok(())
    }

    fn parameters(&self, _: &[u8], name: &str, _: &ThreadPool) -> Result<Array> {
        Err(Error::InvalidArgument(format!("toy: no parameters {name}")))
    }

    fn projection<'a>(&'a self, data: &'a [u8], compute: Compute) -> Result<Box<dyn Projection + 'a>> {
        let view = View::of_experts(&data[HEADER..], Kind::F32, self.0)?;
        Ok(Box::new(Dense::new(view, compute.mode, compute.isa)?))
    }
}

fn write(shape: Shape, values: &[f32]) -> Vec<u8> {
    let mut data = Toy.magic().to_vec();
    for word in [shape.experts, shape.rows, shape.columns, usize::from(shape.ndim)] {
        data.extend((word as u64).to_le_bytes());
    }
    data.resize(HEADER, 0);
    data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    data
}

fn numbers(count: usize, seed: usize) -> Vec<f32> {
    let number = |i: usize| ((i * 7919 + seed * 104_729) % 1009) as f32 / 504.0 - 1.0;
    (0..count).map(number).collect()
}

fn shape(rows: usize, columns: usize) -> Shape {
    Shape {
        experts: 3,
        rows,
        columns,
        ndim: 3,
    }
}

fn compute() -> Compute {
    Compute {
        mode: Mode::Exact,
        activation_bits: None,
        isa: Isa::SCALAR,
    }
}

/// A group-wise tensor with one scale per row.
fn integers(shape: Shape) -> Vec<u8> {
    let rows = shape.all_rows().unwrap();
    let codes: Vec<u8> = (0..rows * shape.columns).map(|i| (i * 31 % 16) as u8).collect();
    let spec = Spec {
        bits: 4,
        group: 0,
        symmetric: true,
        parameters: ParameterType::F16,
    };
    groupwise::encode(
        &codes,
        &vec![0.125; rows],
        None,
        shape,
        spec,
        &pool::current().unwrap(),
    )
    .unwrap()
}

/// Products of a token with an expert, in f64.
fn product(values: &[f32], shape: Shape, expert: usize, x: &[f64]) -> Vec<f64> {
    let rows = values.chunks_exact(shape.columns).skip(expert * shape.rows);
    rows.take(shape.rows)
        .map(|row| row.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum())
        .collect()
}

fn dequantized(data: &[u8]) -> Vec<f32> {
    let tensor = tensor::open(data).unwrap();
    let mut values = vec![f32::NAN; tensor.shape().weights().unwrap()];
    let pool = pool::current().unwrap();
    tensor.dequantize(data, Floats::F32(&mut values), &pool).unwrap();
    values
}

fn near(found: &[f32], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!(
            (f64::from(*found) - expected).abs() <= 1e-4 * (1.0 + expected.abs()),
            "{found} {expected}"
        );
    }
}

#[test]
fn a_registered_format_supports_everything() {
    let (pool, shape) = (pool::current().unwrap(), shape(24, 40));
    let values = numbers(3 * 24 * 40, 1);
    let data = write(shape, &values);
    assert!(matches!(tensor::open(&data), Err(Error::UnknownFormat(_))));

    tensor::register(&Toy).unwrap();
    assert!(tensor::register(&Toy).is_err(), "a magic belongs to one format");
    assert!(tensor::formats().iter().any(|format| format.kind() == "toy"));
    assert_eq!(
        tensor::format("toy").unwrap().bytes(shape, &Details::default()),
        Ok(data.len())
    );

    let tensor = tensor::open(&data).unwrap();
    assert_eq!(
        (tensor.shape(), tensor.bytes(), tensor.format().kind()),
        (shape, data.len(), "toy")
    );
    assert_eq!(tensor.verify(&data, &pool), Ok(()));
    assert_eq!(dequantized(&data), values);
    assert!(tensor::open(&data[..data.len() - 1]).is_err());
    let mut damaged = data.clone();
    damaged[HEADER..HEADER + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    assert!(tensor::open(&damaged).unwrap().verify(&damaged, &pool).is_err());

    check_products(&data, &values, shape);
    check_layer(data, shape);
}

/// Products by each token's own expert equal those of the values.
fn check_products(data: &[u8], values: &[f32], shape: Shape) {
    let x = numbers(5 * shape.columns, 2);
    let mut y = vec![0.0; 5 * shape.rows];
    let tensor = tensor::open(data).unwrap();
    let projection = tensor.projection(data, compute()).unwrap();
    let pool = pool::current().unwrap();
    matmul_grouped(&*projection, &x[..], &[0, 2, 2, 5], &mut y, &pool).unwrap();
    let tokens = [0, 0, 2, 2, 2].into_iter().zip(wide(&x, shape.columns));
    let expected: Vec<f64> = tokens
        .flat_map(|(expert, x)| product(values, shape, expert, &x))
        .collect();
    near(&y, &expected);
}

/// A layer with a format of the core in two of its projections equals the layer of its values.
fn check_layer(gate: Vec<u8>, shape: Shape) {
    let back = Shape {
        rows: shape.columns,
        columns: shape.rows,
        ..shape
    };
    let (layer, x) = (
        [gate, integers(shape), integers(back)],
        numbers(5 * shape.columns, 3),
    );
    let routing = Routing {
        experts: &[2, 0, 1, 1, 3, 2, 0, 2, 1, 0],
        weights: &[0.5; 10],
        top_k: 2,
    };
    near(
        &forward(&layer, &x, routing),
        &naive(&layer, shape, &wide(&x, shape.columns), routing),
    );
}

/// Tokens in f64.
fn wide(x: &[f32], columns: usize) -> Vec<Vec<f64>> {
    x.chunks_exact(columns)
        .map(|x| x.iter().map(|&x| x.into()).collect())
        .collect()
}

/// The layer of three packed tensors.
fn forward(layer: &[Vec<u8>; 3], x: &[f32], routing: Routing) -> Vec<f32> {
    let tensors = layer.each_ref().map(|data| tensor::open(data).unwrap());
    let projection = |i: usize| tensors[i].projection(&layer[i], compute()).unwrap();
    let [gate, up, down] = [0, 1, 2].map(projection);
    let layer = Layer::new(&*gate, &*up, &*down);
    let mut y = vec![0.0; x.len()];
    layer
        .forward(x, routing, &mut y, Isa::SCALAR, &pool::current().unwrap())
        .unwrap();
    y
}

/// The layer one token and one expert at a time, in f64.
fn naive(layer: &[Vec<u8>; 3], shape: Shape, x: &[Vec<f64>], routing: Routing) -> Vec<f64> {
    let [gate, up, down] = layer.each_ref().map(|data| dequantized(data));
    let back = Shape {
        rows: shape.columns,
        columns: shape.rows,
        ..shape
    };
    let mut y = vec![0.0; x.len() * shape.columns];
    for (place, (&expert, &weight)) in routing.experts.iter().zip(routing.weights).enumerate() {
        let Some(expert) = usize::try_from(expert)
            .ok()
            .filter(|&expert| expert < shape.experts)
        else {
            continue;
        };
        let (token, silu) = (place / routing.top_k, |x: f64| x / (1.0 + (-x).exp()));
        let gates = product(&gate, shape, expert, &x[token]);
        let hidden: Vec<f64> = gates
            .into_iter()
            .zip(product(&up, shape, expert, &x[token]))
            .map(|(g, u)| silu(g) * u)
            .collect();
        for (out, value) in y[token * shape.columns..]
            .iter_mut()
            .zip(product(&down, back, expert, &hidden))
        {
            *out += f64::from(weight) * value;
        }
    }
    y
}
