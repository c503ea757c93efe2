//! Golden packed tensors remain readable, and encoding gives the same bytes.

use moepack_core::formats::ternary::{self, Code, TernaryView};
use moepack_core::pool;
use moepack_core::types::Shape;
use serde_json::Value;

use super::{cases, read};

struct Case {
    name: String,
    shape: Shape,
    codes: Vec<i8>,
    levels: Vec<(f32, f32)>,
    level_type: String,
}

fn case(json: &Value) -> Option<Case> {
    let number = |value: &Value| value.as_u64().map(|n| n as usize);
    let shape: Vec<usize> = json["shape"]
        .as_array()?
        .iter()
        .map(number)
        .collect::<Option<_>>()?;
    let text = json["rows"]
        .as_array()?
        .iter()
        .map(Value::as_str)
        .collect::<Option<String>>()?;
    let levels: Vec<f32> = json["levels"]
        .as_array()?
        .iter()
        .map(|x| x.as_f64().map(|x| x as f32))
        .collect::<Option<_>>()?;
    Some(Case {
        name: json["name"].as_str()?.into(),
        shape: Shape {
            experts: shape[0],
            rows: shape[1],
            columns: shape[2],
            ndim: number(&json["rank"])? as u8,
        },
        codes: text
            .bytes()
            .map(|byte| b"-0+".iter().position(|&b| b == byte).unwrap() as i8 - 1)
            .collect(),
        levels: levels
            .as_chunks::<2>()
            .0
            .iter()
            .map(|&[negative, positive]| (negative, positive))
            .collect(),
        level_type: json["level_dtype"].as_str()?.into(),
    })
}

#[test]
fn golden_files_decode_and_are_written_the_same() {
    let pool = pool::current().unwrap();
    for json in cases("ternary") {
        let case = case(&json).unwrap();
        for code in Code::ALL {
            let file = format!("{}.{}.bin", case.name, code.name());
            let bytes = read(&format!("ternary/{file}"));
            let view = TernaryView::parse(&bytes).unwrap();
            view.verify(&pool).unwrap();
            assert_eq!(
                (view.shape(), view.code(), view.level_type().name()),
                (case.shape, code, &*case.level_type)
            );
            let mut codes = vec![0; case.codes.len()];
            ternary::decode_codes(&view, &mut codes, &pool).unwrap();
            assert!(codes == case.codes, "{file}");
            let levels: Vec<_> = (0..case.levels.len()).map(|row| view.levels(row)).collect();
            assert_eq!(levels, case.levels, "{file}");
            let again = ternary::encode(&codes, &levels, case.shape, code, &pool).unwrap();
            assert!(again == bytes, "{file}");
        }
    }
}
